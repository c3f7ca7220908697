#!/usr/bin/env bash
# scripts/schemathesis.sh [EXAMPLES]: asks a controller of its own all that its OpenAPI document describes, and much that it does
# not, and checks each answer against the document: no 5xx, no status, content type or body that it does not describe. Then the
# figures, by Prometheus' own parser, and the events. The seed is fixed, so that what it finds can be found again: SEED=N for another. Needs
# what `scripts/setup.sh api` installs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
document=$PWD/docs/openapi.json
target=${CARGO_TARGET_DIR:-target}
godwit=${GODWIT:-$target/release/godwit}
fakes=${FAKES:-$target/release/examples/among_fakes}
examples=${1:-200}
seed=${SEED:-7400}
venv=$(realpath -m "${SCHEMATHESIS_VENV:-$target/schemathesis}")
work=$(mktemp -d)
controller=
finish() {
    if [ -n "$controller" ]; then kill "$controller" 2>/dev/null && wait "$controller" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap finish EXIT

if [ ! -x "$fakes" ]; then
    cargo build --release --locked -p godwit-controller --example among_fakes
fi
if [ ! -x "$venv/bin/schemathesis" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet schemathesis==4.32.5 prometheus-client==0.26.0
fi

# Certificates of an authority of its own, and a controller that knows no node that answers: what needs one has to fail well, too.
# Who asks is called as nobody in the document's examples is: those are revoked, which is asked for as well.
"$godwit" pki init --dir "$work/ca" >/dev/null
for who in controller:controller client:fuzzer operator:prometheus; do
    "$godwit" pki issue --ca "$work/ca" --role "${who%:*}" --name "${who#*:}" --out "$work/${who#*:}" >/dev/null
done
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
GODWIT_LOG=warn "$godwit" controller --listen "127.0.0.1:$port" --state "$work/state" --credentials "$work/controller" \
    --log-format json 2>"$work/log" &
controller=$!
api=(--controller "127.0.0.1:$port" --credentials "$work/fuzzer")
for _ in $(seq 100); do
    "$godwit" "${api[@]}" site ls >/dev/null 2>&1 && break
    sleep 0.1
done
"$godwit" "${api[@]}" site add a
"$godwit" "${api[@]}" host add b --site a --api 127.0.0.1:9 2>/dev/null
"$godwit" "${api[@]}" component add c --switch br0

# The server's name is not in its certificate as an address, which is all that a fuzzer can ask by; that it is checked is
# tested elsewhere (crates/api/tests/over_tls.rs). The stream of events has no end: it is asked below. 502 is what a host that does not
# answer is told by, so it is no failure of the server's. What depends on two members of a body (`max_vcpus` on `vcpus`, to boot from a
# disk on there being one) no schema says: so not all that fits the one of a VM is taken. And the fuzzer writes an integer as 1.0 at
# times, which is one for JSON Schema and not for serde. A move may be blocked (422).
cat >"$work/schemathesis.toml" <<'T'
[checks]
enabled = false
status_code_conformance.enabled = true
content_type_conformance.enabled = true
response_schema_conformance.enabled = true
allow_header_conformance.enabled = true
unsupported_method.enabled = true
negative_data_rejection.enabled = true
positive_data_acceptance.enabled = true
positive_data_acceptance.expected-statuses = ["2xx", "403", "404", "409", "422", "5xx"]
not_a_server_error.enabled = true
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "502"]
[[operations]]
include-path-regex = "^/v1/(vms|moves|moves/{id}/limit|tokens|hosts/{host}/token)$"
checks.positive_data_acceptance.enabled = false
T
status=0
# What it keeps goes with the rest. fuzz ADDRESS CREDENTIALS CONFIGURATION [OPTION...]
fuzz() {
    local address=$1 credentials=$2 config=$3
    shift 3
    (cd "$work" && "$venv/bin/schemathesis" --config-file "$config" run "$document" --url "https://$address" \
        --tls-verify false --request-cert "$credentials/cert.pem" --request-cert-key "$credentials/key.pem" \
        --exclude-path /v1/events --phases examples,coverage,fuzzing --max-examples "$examples" --seed "$seed" \
        --request-timeout 60 --continue-on-failure --generation-database none --no-color "$@") || status=1
}
echo "== a controller that is empty, and whose host does not answer"
fuzz "127.0.0.1:$port" "$work/fuzzer" "$work/schemathesis.toml"

echo "== a controller among fake nodes, with a VM and a move under way"
{ cat "$work/schemathesis.toml" && printf '[parameters]\nvm = "web"\nhost = "texas"\nsite = "east"\n"path.id" = 1\n'; } >"$work/among.toml"
coproc FAKES_RUN { exec "$fakes" 2>"$work/fakes.log"; }
fakes_in=${FAKES_RUN[1]}
read -r address credentials <&"${FAKES_RUN[0]}"
# What is deleted would not be there for the rest.
fuzz "$address" "$credentials" "$work/among.toml" --exclude-method DELETE
exec {fakes_in}>&-
if grep panicked "$work/fakes.log"; then status=1; fi

# It is still there, and says nothing wrong of itself.
kill -0 "$controller"
curl() {
    command curl --silent --show-error --fail --insecure --cert "$work/$1/cert.pem" --key "$work/$1/key.pem" \
        "https://127.0.0.1:$port$2"
}
curl prometheus /metrics >"$work/metrics"
"$venv/bin/python" - "$work/metrics" <<'P'
import sys
from prometheus_client.parser import text_string_to_metric_families
families = list(text_string_to_metric_families(open(sys.argv[1]).read()))
names = {family.name for family in families}
assert "godwit_build_info" in names and "godwit_vm_migrations" in names, names
assert all(family.documentation and family.type in ("gauge", "counter") for family in families)
print(f"metrics: {len(families)} families, {sum(len(f.samples) for f in families)} samples, read by Prometheus' own parser")
P
curl fuzzer '/v1/events?after=0&follow=false' >"$work/events"
echo "events: $(grep -c '^data: ' "$work/events")"
"$godwit" "${api[@]}" events --after 0 --no-follow --json | tail -1 | python3 -m json.tool >/dev/null
if grep -q '"level":"ERROR"\|panicked' "$work/log"; then
    echo "the controller's log:" && cat "$work/log" && status=1
fi
exit "$status"
