#!/usr/bin/env bash
# scripts/deb-guest.sh [--verbose] [--binary FILE]
#
# Tries the Debian packages inside a fresh debian guest, under emulation: they
# are installed by apt from a disk that holds them and what they depend on;
# controller and node come up and are enrolled; a hung one is restarted by its
# watchdog, a killed one too, and a guest of the node's outlives both and an
# upgrade; purged, nothing is left. packaging/deb/check-in-guest.sh is what the
# guest does. Takes some minutes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=images/lib.sh
. "$root/images/lib.sh"
# shellcheck source=images/guest.sh
. "$root/images/guest.sh"

verbose=no
binary=()
while [ $# -gt 0 ]; do
    case $1 in
        --verbose) verbose=yes; shift ;;
        --binary) binary=(--binary "$2"); shift 2 ;;
        *) die "unknown option $1: see the head of $0" ;;
    esac
done
need_root scripts/deb-guest.sh
need_command dpkg-scanpackages dpkg-dev
need_command debugfs e2fsprogs
image=$images/debian
[ -e "$image/manifest.json" ] || die "no debian image in $images: run scripts/setup.sh debian"

# ---- A disk with the packages ---------------------------------------------------

prepared=$(mktemp -d "${TMPDIR:-/var/tmp}/godwit-deb.XXXXXX")
finish() { stop_guest; rm -rf "$prepared"; }
disk=$prepared/disk
mkdir -p "$disk/upgrade" "$prepared/lists" "$prepared/archives/partial"
trap 'rm -rf "$prepared"' EXIT
"$root/scripts/deb.sh" "${binary[@]}" --lint no "$disk"
"$root/scripts/deb.sh" "${binary[@]}" --version 9999-1 --lint no "$disk/upgrade"

# What a fresh guest lacks of it: from this machine's archives, as for the guest's own image.
debugfs -R "dump /var/lib/dpkg/status $prepared/status" "$image/data.raw" 2>/dev/null
depends() {
    apt-get -qq -y -o Dir::State::status="$prepared/status" -o Dir::Cache::archives="$prepared/archives" \
        -o Debug::NoLocking=1 -o APT::Sandbox::User=root --download-only install --no-install-recommends \
        adduser qemu-system-x86 qemu-utils nftables >&2
}
say "fetching what the packages depend on"
apt_with_update depends || die "apt cannot fetch what the packages depend on: its message is above"
mv "$prepared/archives"/*.deb "$disk/"
cp "$root/packaging/deb/check-in-guest.sh" "$disk/"
(cd "$disk" && dpkg-scanpackages --multiversion . 2>/dev/null | awk '
    # One paragraph a package; those of the later version are installed by hand.
    BEGIN { RS = ""; ORS = "\n\n" } !/Filename: \.\/upgrade\//' >Packages)
echo 'deb [trusted=yes] file:/mnt ./' >"$disk/local.list"
count=$(find "$disk" -maxdepth 1 -name '*.deb' | wc -l)
size=$(($(du -sm "$disk" | cut -f 1) * 5 / 4 + 16))
mke2fs -q -t ext4 -d "$disk" "$prepared/packages.raw" "${size}M"
say "$count packages, $size MiB"

# ---- The guest -------------------------------------------------------------------

# shellcheck disable=SC2034  # read by guest.sh
vcpus=2
# shellcheck disable=SC2034
devices=(
    -drive "if=none,id=packages,file=$prepared/packages.raw,format=raw,readonly=on"
    -device "virtio-blk-pci,drive=packages"
)
start_guest debian data.raw 10G 1048584
trap finish EXIT
await_console '^GODWIT-GUEST-READY' 180 >/dev/null
printf 'debian guest: ready after %s s\n' "$(seconds_since "$start")"
await_console '^Linux godwit-guest' 60 >/dev/null
printf 'export TERM=dumb PS1=; bind "set enable-bracketed-paste off"\n' >&3
printf 'mount -o ro /dev/vdb /mnt; bash /mnt/check-in-guest.sh /mnt\n' >&3
status=0
(await_console '^DEB-GUEST (done|failed)' 5400 >"$prepared/last") || status=1
tr -d '\r' <"$work/console" | sed -n 's/^DEB-CHECK \([^ ]*\) ok \(.*\)/debian guest: \1: \2 s/p; s/^DEB-CHECK \([^ ]*\) FAILED \(.*\)/debian guest: \1: FAILED after \2 s/p'
[ "$verbose" = no ] || tr -d '\r' <"$work/console" >&2
grep -q 'done' "$prepared/last" || status=1
[ "$status" = 0 ] || die "the packages failed a check; run with --verbose for the guest's console"
say "all checks passed, $(seconds_since "$start") s in all"
