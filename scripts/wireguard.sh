#!/usr/bin/env bash
# scripts/wireguard.sh [SECONDS [ROUNDS]]
#
# Extenders on the kernel's WireGuard, whatever kernel this machine has: the tests of tunnels and of extenders on Debian's own kernel
# (scripts/debian-kernel.sh), where the kernel's device has to be the one that is chosen; and what the kernel, wireguard-go and OpenVPN
# cost there, in one run, SECONDS (5) of TCP each, in turn, ROUNDS (5) times. With ROUNDS 0 nothing is measured. Takes some minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# In the guest, with the built programs: a test that is skipped there is none.
if [ "${1:-}" = --in-guest ]; then
    tunnels=$2 extenders=$3 speed=$4 seconds=$5 rounds=$6
    ip link add gxtry type wireguard && ip link del gxtry || { echo "kernel $(uname -r) makes no WireGuard device"; exit 1; }
    echo "== kernel $(uname -r), $(nproc) vCPUs"
    "$tunnels" --test-threads=1 --nocapture
    (cd crates/cli && "$extenders" --test-threads=1 --nocapture extenders::)
    [ "$rounds" = 0 ] || "$speed" "$seconds" "$rounds"
    exit
fi

seconds=${1:-5}
rounds=${2:-5}
built() { # PACKAGE TEST: the program that cargo makes of it
    cargo test --release --locked --no-run --message-format=json-render-diagnostics -p "$1" --test "$2" |
        sed -n "/\"kind\":\[\"test\"\]/s/.*\"executable\":\"\([^\"]*\)\".*/\1/p"
}
tunnels=$(built godwit-wire tunnels)
extenders=$(built godwit all)
speed=$(cargo build --release --locked --message-format=json-render-diagnostics -p godwit-wire --example extender_speed |
    sed -n '/"kind":\["example"\]/s/.*"executable":"\([^"]*\)".*/\1/p')

said=$(mktemp)
trap 'rm -f "$said"' EXIT
# OpenVPN's cipher is measured with the instructions that every processor has for it; wherever they are emulated, so are all others.
scripts/debian-kernel.sh --cpu qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt,+aes,+pclmulqdq --seconds 3000 \
    scripts/wireguard.sh --in-guest "$tunnels" "$extenders" "$speed" "$seconds" "$rounds" | tee "$said"
if grep SKIPPED "$said" >&2; then
    echo 'wireguard.sh: error: a test was skipped: run scripts/setup.sh wires' >&2
    exit 1
fi
