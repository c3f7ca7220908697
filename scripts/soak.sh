#!/usr/bin/env bash
# scripts/soak.sh: what takes hours. Every part can be stopped and goes on where it was: the sweep by its ledger, the
# series by one file for each run. Results stay in results/ (see CONTRIBUTING.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
lab=$target/release/godwit-lab
# Said to the sweeps: the ledger is tracked, so that after its first line the tree counts as changed.
commit=$(git rev-parse --short=12 HEAD)
mkdir -p results

echo "== a million schedules of the hand-off"
GODWIT_SIM_SCHEDULES=1000000 cargo test --release --locked -p godwit-sim --test schedules

echo "== ten million operations of guests whose disks follow them"
GODWIT_POSTCOPY_SCHEDULES=60000 cargo test --release --locked -p godwit-sim --test postcopy a_guest -- --nocapture

echo "== the whole API, by its own document"
scripts/schemathesis.sh 500

echo "== bytes that nobody should send, two minutes for each reader, other ones for each commit"
GODWIT_FUZZ_SECONDS=120 GODWIT_FUZZ_SEED=$((16#${commit:0:7})) cargo test --release --locked -p godwit-fuzz --test targets -- \
    --nocapture

echo "== a node and its controller replaced under a guest that writes"
cargo test --release --locked -p godwit --test upgrade -- --nocapture

echo "== twenty runs killed at moments spread over their life"
GODWIT_LAB_KILLS=20 cargo test --release --locked -p godwit-lab --test runs -- \
    a_run_that_is_killed_at_any_moment_leaves_nothing_behind

echo "== ten moves in a row, there and back, all checks"
series=results/series-$commit.json
[ -e "$series" ] || "$lab" run scenarios/series.toml --report "$series"

echo "== twenty moves by Godwit in a row, there and back, all checks"
back=results/there-and-back-$commit.json
[ -e "$back" ] || "$lab" run scenarios/there-and-back.toml --report "$back"

echo "== guests with disks of 1 GiB, 100 GiB and 4 TiB: does the pause grow?"
volumes=results/volumes-$commit.json
[ -e "$volumes" ] || "$lab" run scenarios/volumes.toml --report "$volumes"

echo "== a fault at every step of a move"
scripts/faults.sh

echo "== a full Debian guest"
scripts/setup.sh debian
debian=results/debian-$commit.json
[ -e "$debian" ] || "$lab" run scenarios/debian.toml --report "$debian"

echo "== the Debian packages in a fresh Debian guest"
cargo build --release --locked -p godwit
packages=results/deb-guest-$commit.txt
[ -e "$packages" ] || { scripts/deb-guest.sh >"$packages.new" && mv "$packages.new" "$packages"; }

echo "== what QEMU does alone, over the links that Godwit is for"
"$lab" sweep scenarios/baselines.sweep.toml --ledger results/ledger.jsonl --commit "$commit"
"$lab" sweep scenarios/block.sweep.toml --ledger results/ledger.jsonl --commit "$commit"
