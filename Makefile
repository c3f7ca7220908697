# Everything sets itself up: packages, guest images, builds. See CONTRIBUTING.md.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: build guests setup demo test lint deny deb bench soak clean

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
LAB := $(TARGET)/release/godwit-lab
HOST := x86_64-unknown-linux-gnu

build: guests
	cargo build --release --locked --workspace

# What runs inside guests. Static, because they have no C library of ours; in a folder of its own, because other flags in the same folder
# would rebuild everything each time.
guests:
	RUSTFLAGS="-C target-feature=+crt-static" cargo build --release --locked \
	    -p godwit-load --target $(HOST) --target-dir $(TARGET)/static

# Another QEMU is tried against this one's where it can be had.
setup:
	scripts/setup.sh tiny
	scripts/setup.sh qemu10 || echo 'no second QEMU: moves between versions are not tried' >&2

# A guest moves between two sites over 100 Mbit/s and 27 ms, under load. The report stays.
demo: setup build
	$(LAB) run scenarios/demo.toml --report $(TARGET)/demo/report.json --plot $(TARGET)/demo/report.html
	@echo "report: $(TARGET)/demo/report.json and $(TARGET)/demo/report.html"

# In the tests' profile: what runs at compile time is made once for both.
lint:
	cargo fmt --all --check
	cargo clippy --profile tested --workspace --all-targets --locked -- -D warnings
	# What is shipped is built without the features that tests turn on.
	cargo check --profile tested --locked -p godwit

# Licences, sources and duplicate versions of what we depend on. Advisories need the internet: see CONTRIBUTING.md.
deny:
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny --all-features check bans licenses sources

# Debian packages, in target/deb. The program by itself: see ARCHITECTURE.md on the simulator's feature.
deb:
	scripts/setup.sh deb
	cargo build --release --locked -p godwit
	scripts/deb.sh $(TARGET)/deb

# In a profile of its own (Cargo.toml): most of its time on a clean machine is compiling. With the tests' features everything would be compiled
# again after `build`, so the programs that they run are made with them. Examples are checked by `lint`.
test: setup guests lint
	scripts/test.pl

# Figures. None of them is asserted: they belong to the machine that made them.
bench: setup build
	scripts/setup.sh nbd
	cargo run --release --locked -p godwit-wan --example goodput
	cargo run --release --locked -p godwit-link --example link_goodput
	cargo run --release --locked -p godwit-content --example content_speed
	cargo run --release --locked -p godwit-volume --example fill_wait
	cargo run --release --locked -p godwit-volume --example last_word
	cargo run --release --locked -p godwit-link --example gives_way
	scripts/bench-nbd.pl $(TARGET)/release/godwit
	$(LAB) figures guest-io --quick --ledger $(TARGET)/figures.jsonl --out $(TARGET)/figures
	$(LAB) figures writes --quick --ledger $(TARGET)/figures.jsonl --out $(TARGET)/figures

# Long runs, resumable: the ledger knows what was done at this commit.
soak: setup build
	scripts/soak.sh

clean:
	cargo clean
