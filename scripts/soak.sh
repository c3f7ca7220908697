#!/usr/bin/env bash
# scripts/soak.sh [PART...]: what takes hours. Every part can be stopped and goes on where it was: the sweep by its ledger, the
# series by one file for each run. Results stay in results/ (see CONTRIBUTING.md). PARTs: schedules postcopy follows nbd api fuzz upgrade kills
# series there-and-back resume precache rados volumes faults debian packages wireguard sweeps predictions; all of them unless some are
# named.
#
# For a try of the script itself sizes come from the environment: SOAK_SCHEDULES, SOAK_POSTCOPY, SOAK_FOLLOWS, SOAK_EXAMPLES (a request of the
# API's), SOAK_FUZZ_SECONDS (a reader), SOAK_KILLS, SOAK_MOVES (the first ones of a series), POINTS and KINDS (of faults, see faults.sh),
# SOAK_RATES, SOAK_RTTS and SOAK_SWEPT (of sweeps: lists for TOML, and a scenario), SOAK_FORETOLD (of predictions: texts for `--only`).
# SOAK_RESULTS is another folder than results/, and then the table of faults goes there as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
lab=$target/release/godwit-lab
results=${SOAK_RESULTS:-results}
# Said to the sweeps: the ledger is tracked, so that after its first line the tree counts as changed.
commit=$(git rev-parse --short=12 HEAD)
mkdir -p "$results"
results=$(cd "$results" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

parts=${*:-schedules postcopy follows nbd api fuzz upgrade kills series there-and-back resume precache rados volumes faults debian packages wireguard sweeps predictions}
part() { # NAME WHAT
    case " $parts " in *" $1 "*) echo "== $2" ;; *) return 1 ;; esac
}
# A scenario, or its first moves with what follows each; its report is kept once the run has done what it should.
report() { # NAME
    local kept=$results/$1-$commit.json moves=${SOAK_MOVES:-1000000}
    [ -e "$kept" ] && return 0
    # A step is held back until it is known whether it is a move.
    awk -v moves="$moves" '
        /^\[\[step\]\]/ || (held && /^after_s/) { held = held $0 "\n"; next }
        held && /^move = / && ++seen > moves { exit }
        { printf "%s%s\n", held, $0; held = "" }' "scenarios/$1.toml" >"$work/$1.toml"
    "$lab" run "$work/$1.toml" --report "$kept.new"
    mv "$kept.new" "$kept"
}
sweep() { # NAME
    sed -e "s|^scenario = \"\(.*\)\"|scenario = \"$PWD/scenarios/${SOAK_SWEPT:-\1}\"|" \
        -e "${SOAK_RATES:+s|^rate_mbit = .*|rate_mbit = $SOAK_RATES|}" \
        -e "${SOAK_RTTS:+s|^rtt_ms = .*|rtt_ms = $SOAK_RTTS|}" "scenarios/$1.sweep.toml" >"$work/$1.sweep.toml"
    "$lab" sweep "$work/$1.sweep.toml" --ledger "$results/ledger.jsonl" --commit "$commit"
}
figures() { # PAPER [--only TEXTS]
    "$lab" figures "$@" --ledger "$results/ledger.jsonl" --commit "$commit" --out "$results/$1-$commit"
}
tests() { cargo test --release --locked "$@"; }

if part schedules "a million schedules of the hand-off"; then
    GODWIT_SIM_SCHEDULES=${SOAK_SCHEDULES:-1000000} tests -p godwit-sim --test schedules
    GODWIT_SIM_SCHEDULES=${SOAK_CLAIMS:-300000} tests -p godwit-sim --test claims
fi
if part postcopy "ten million operations of guests whose disks follow them"; then
    GODWIT_POSTCOPY_SCHEDULES=${SOAK_POSTCOPY:-60000} tests -p godwit-sim --test postcopy a_guest -- --nocapture
fi
if part follows "guests whose memory follows them: in simulation, and between nodes again and again"; then
    GODWIT_SIM_SCHEDULES=${SOAK_SCHEDULES:-300000} tests -p godwit-sim --test pages a_guest -- --nocapture
    for ((round = 0; round < ${SOAK_FOLLOWS:-20}; round++)); do
        tests -p godwit --test all -- --ignored --nocapture postcopy::
    done
fi
if part nbd "our NBD server under the clients that others wrote: fio's checks, libnbd's own calls, and its interop tests"; then
    scripts/setup.sh nbd libnbd
    scripts/interop-nbd.sh "$target/release/godwit"
    scripts/interop-libnbd.sh "$target/release/godwit"
fi
if part api "the whole API, by its own document"; then
    scripts/setup.sh api
    scripts/schemathesis.sh "${SOAK_EXAMPLES:-500}"
fi
if part fuzz "bytes that nobody should send, two minutes for each reader, other ones for each commit"; then
    GODWIT_FUZZ_SECONDS=${SOAK_FUZZ_SECONDS:-120} GODWIT_FUZZ_SEED=$((16#${commit:0:7})) \
        tests -p godwit-fuzz --test targets -- --nocapture
fi
if part upgrade "a node and its controller replaced under a guest that writes"; then
    tests -p godwit --test all -- --nocapture upgrade::
fi
if part kills "twenty runs killed at moments spread over their life"; then
    GODWIT_LAB_KILLS=${SOAK_KILLS:-20} tests -p godwit-lab --test runs -- \
        a_run_that_is_killed_at_any_moment_leaves_nothing_behind
fi
if part series "ten moves in a row, there and back, all checks"; then
    report series
fi
if part there-and-back "twenty moves by Godwit in a row, there and back, all checks"; then
    report there-and-back
fi
if part resume "both nodes die in the middle of a 1 GiB disk and of memory, and the move goes on"; then
    report resume
fi
if part precache "disks that are sent beforehand, there and back, over a cut and a dead node"; then
    tests -p godwit-lab --test runs -- --ignored --nocapture a_pre_cached_guest
fi
if part rados "volumes in a pool of a Ceph cluster of one machine"; then
    tests -p godwit --test all -- --ignored --nocapture rados::
fi
if part volumes "guests with disks of 1 GiB, 100 GiB and 4 TiB: does the pause grow?"; then
    report volumes
fi
if part faults "a fault at every step of a move"; then
    RESULTS=$results/faults-$commit TABLE=${SOAK_RESULTS:+$results/faults.md} scripts/faults.sh
fi
if part debian "a full Debian guest"; then
    scripts/setup.sh debian
    report debian
fi
if part packages "the Debian packages in a fresh Debian guest"; then
    cargo build --release --locked -p godwit
    packages=$results/deb-guest-$commit.txt
    [ -e "$packages" ] || { scripts/deb-guest.sh >"$packages.new" && mv "$packages.new" "$packages"; }
fi
if part wireguard "extenders on the kernel's WireGuard, in a guest on Debian's kernel, and what that costs beside the programs"; then
    scripts/setup.sh wires
    wireguard=$results/wireguard-$commit.txt
    [ -e "$wireguard" ] || { scripts/wireguard.sh >"$wireguard.new" && mv "$wireguard.new" "$wireguard"; }
fi
if part sweeps "what QEMU does alone, over the links that Godwit is for"; then
    sweep baselines
    sweep block
fi
if part predictions "moves foretold and measured, over three links, idle to far above the link, by Godwit and by QEMU; and the best moment"; then
    case "${SOAK_FORETOLD:-compile}" in *compile*) scripts/setup.sh debian ;; esac
    figures predict ${SOAK_FORETOLD:+--only "$SOAK_FORETOLD"}
    [ -n "${SOAK_FORETOLD:-}" ] || figures when
fi
