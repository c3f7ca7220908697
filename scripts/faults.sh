#!/usr/bin/env bash
# scripts/faults.sh: a fault at every step of a move. For each point of the hand-off: SIGKILL of either node, of either QEMU
# where its RAM is not the only copy, of the controller; a cut of 1, 10 and 60 s. After each the guest has to run in exactly one place, intact, and a second
# try has to succeed. One report for each fault in results/: what is there is not run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lab=${CARGO_TARGET_DIR:-target}/release/godwit-lab
results=results/faults-$(git rev-parse --short=12 HEAD)
mkdir -p "$results"
scenario=$(mktemp --suffix=.toml)
trap 'rm -f "$scenario"' EXIT
failed=()

# try NAME STEP
try() {
    local report=$results/$1.json
    [ -e "$report" ] && return
    {
        sed '/^\[\[step\]\]/,$d; s/^godwit = false/godwit = true/; /^baseline/d' scenarios/smoke.toml
        cat <<STEPS
[[step]]
$2
[[step]]
after_s = 1
move = { vm = "vm", to = "b" }
[[step]]
expect = { vm = "vm" }
[[step]]
verify = { vm = "vm" }
[[step]]
move = { vm = "vm", to = "b", retry = true }
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
}

for point in ${POINTS:-copy-disk memory stopped sealing sealed commit granted started}; do
    for site in a b; do
        try "node-$site-$point" "kill = { what = \"node\", site = \"$site\", vm = \"vm\", at = \"$point\" }"
    done
    # Elsewhere the guest's only RAM dies with its QEMU: it boots from its disks, and has no session to be verified.
    case $point in sealed | commit | granted | started)
        try "qemu-a-$point" "kill = { what = \"qemu\", site = \"a\", vm = \"vm\", at = \"$point\" }" ;;
    esac
    case $point in copy-disk | memory | stopped | sealing | sealed | commit | granted)
        try "qemu-b-$point" "kill = { what = \"qemu\", site = \"b\", vm = \"vm\", at = \"$point\" }" ;;
    esac
    try "controller-$point" "kill = { what = \"controller\", vm = \"vm\", at = \"$point\" }"
    for seconds in 1 10 60; do
        try "cut-$seconds-$point" "cut = { between = [\"a\", \"b\"], vm = \"vm\", at = \"$point\", for_s = $seconds }"
    done
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "these did not end as they should: ${failed[*]}" >&2
    exit 1
fi
