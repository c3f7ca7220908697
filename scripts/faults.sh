#!/usr/bin/env bash
# scripts/faults.sh [TABLE]: the kill matrix. At each point of a move: SIGKILL of either node, of both, of either QEMU, of the controller; a
# cut of 1, 10 and 60 s. After each the guest has to run in exactly one place, intact, and a second try has to succeed. Where
# the QEMU dies that held the guest's only RAM, the guest has to be restarted from its disk, with all that the disk had.
# One report for each fault in results/: what is there is not run again. At the end docs/faults.md is written from
# the reports that are there; with `TABLE` nothing else is done. POINTS and KINDS choose; RESULTS, TABLE and LAB say where
# reports, table and binary are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lab=${LAB:-${CARGO_TARGET_DIR:-target}/release/godwit-lab}
results=${RESULTS:-results/faults-$(git rev-parse --short=12 HEAD)}
table=${TABLE:-docs/faults.md}
mkdir -p "$results"
if [ "${1:-}" = TABLE ]; then
    scripts/faults-table.pl "$results" >"$table"
    exit
fi
scenario=$(mktemp --suffix=.toml)
trap 'rm -f "$scenario"' EXIT
failed=()

# try NAME STEP [EXPECTED]; $disk says how the disk goes, and $wan what is said of the WAN
disk='' wan=''
try() {
    local report=$results/$1.json
    [ -e "$report" ] && return 0
    case " ${KINDS:-node nodes qemu controller cut} " in *" ${1%%-*} "*) ;; *) return 0 ;; esac
    {
        sed "/^\[\[step\]\]/,\$d; s/^godwit = false/godwit = true/; /^baseline/d; $wan" scenarios/smoke.toml
        cat <<STEPS
[[step]]
$2
[[step]]
after_s = 1
move = { vm = "vm", to = "b"$disk }
[[step]]
expect = { vm = "vm"${3:-} }
[[step]]
verify = { vm = "vm" }
[[step]]
move = { vm = "vm", to = "b", retry = true$disk }
[[step]]
expect = { vm = "vm", site = "b" }
[[step]]
verify = { vm = "vm" }
STEPS
    } >"$scenario"
    echo "== $1"
    if ! "$lab" run "$scenario" --report "$results/$1.tmp" >"$results/$1.log" 2>&1; then
        failed+=("$1")
        tail -n 20 "$results/$1.log"
    fi
    # A run that could not be made leaves no report, and is made again next time.
    [ -e "$results/$1.tmp" ] && mv "$results/$1.tmp" "$report"
    return 0
}

all="reserve staged copy-disk memory stopped sealing sealed commit granted started proving releasing settling fill"
for point in ${POINTS:-$all}; do
    # Whose QEMU holds the only RAM then, and so takes the guest's life with it; whether there is one to be killed at all.
    before=1 after='' disk='' wan=''
    case $point in
        # Once the seal is being written the destination has everything.
        sealing | sealed | commit | granted) before= ;;
        started | proving | releasing | settling) before='' after=1 ;;
        # The guest runs at the destination, and its disk follows: over a link that is slow enough for that to last.
        fill) before='' after=1 disk=', disk = "postcopy"' wan='s/^rate_mbit = .*/rate_mbit = 40/' ;;
    esac
    for site in a b; do
        try "node-$site-$point" "kill = { what = \"node\", site = \"$site\", vm = \"vm\", at = \"$point\" }"
    done
    try "nodes-$point" "kill = { what = \"node\", site = \"a\", vm = \"vm\", at = \"$point\" }
[[step]]
kill = { what = \"node\", site = \"b\", vm = \"vm\", at = \"$point\", restart_after_s = 4 }"
    # Once the guest runs at the destination there is no QEMU at the source any more; at `releasing` it is about to go.
    case $point in
        started | proving | settling | fill) ;;
        *) try "qemu-a-$point" "kill = { what = \"qemu\", site = \"a\", vm = \"vm\", at = \"$point\" }" "${before:+, rebooted = true}" ;;
    esac
    # Before the place is made there is none at the destination.
    case $point in
        reserve | staged) ;;
        *) try "qemu-b-$point" "kill = { what = \"qemu\", site = \"b\", vm = \"vm\", at = \"$point\" }" "${after:+, rebooted = true}" ;;
    esac
    try "controller-$point" "kill = { what = \"controller\", vm = \"vm\", at = \"$point\" }"
    for seconds in 1 10 60; do
        try "cut-$seconds-$point" "cut = { between = [\"a\", \"b\"], vm = \"vm\", at = \"$point\", for_s = $seconds }"
    done
done
scripts/faults-table.pl "$results" >"$table"
if [ ${#failed[@]} -gt 0 ]; then
    echo "these did not end as they should: ${failed[*]}" >&2
    exit 1
fi
