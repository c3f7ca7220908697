#!/usr/bin/env bash
# images/tiny.sh OUTDIR
#
# Makes the tiny guest in OUTDIR/tiny: vmlinuz (Debian's cloud kernel), initrd
# (busybox, the virtio modules, /init), data-MIB.raw (disk templates of several
# sizes; data.raw names the largest) and manifest.json. The load program is not
# in it: the lab appends a second archive that holds /bin/godwit-load.
# GODWIT_DATA_MIB lists the sizes, "64 256 1024" unless set.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=images/lib.sh
. "$here/lib.sh"

if [ "${1:-}" = --stamp ]; then
    recipe_stamp "$here"/{lib.sh,tiny.sh,guest-init,data.sh,choose-files.pl,records.pl}
    exit
fi
[ $# = 1 ] || die "usage: images/tiny.sh OUTDIR"
need_root images/tiny.sh
need_command modprobe kmod
need_command cpio cpio
mkdir -p "$1"
need_space_mib "$1" 4096
out=$(cd "$1" && pwd)/tiny
[ ! -e "$out" ] || die "$out is there already: remove it first, or let scripts/setup.sh replace it"

work=$(mktemp -d "$(dirname "$out")/.tiny.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
trap 'die "line $LINENO failed: $BASH_COMMAND"' ERR
image=$work/tiny
tree=$work/tree
mkdir -p "$image" "$tree"

release=$(unpack_kernel "$work/kernel")
cp "$work/kernel/boot/vmlinuz-$release" "$image/vmlinuz"

add_guest_init "$tree" "$here/guest-init"
add_modules "$tree" "$work/kernel" "$release" "${GUEST_MODULES[@]}"
# A program built on this machine with cargo's defaults links to the C library
# of this machine: with these four files it runs in the guest, static or not.
mkdir -p "$tree/lib64" "$tree/lib/x86_64-linux-gnu"
cp -L /lib64/ld-linux-x86-64.so.2 "$tree/lib64/"
cp -L /lib/x86_64-linux-gnu/{libc.so.6,libm.so.6,libgcc_s.so.1} "$tree/lib/x86_64-linux-gnu/"
pack_initrd "$tree" "$image/initrd"

sizes=''
for mib in ${GODWIT_DATA_MIB:-64 256 1024}; do
    nice "$here/data.sh" "$image/data-$mib.raw" "$mib"
    bytes=$(stat -c %s "$image/data-$mib.raw")
    sizes+="${sizes:+, }{\"file\": \"data-$mib.raw\", \"content_mib\": $mib, \"fs_bytes\": $bytes}"
    ln -sf "data-$mib.raw" "$image/data.raw"
done

cat >"$image/manifest.json" <<JSON
{
  "image": "tiny",
  "stamp": "$("$here/tiny.sh" --stamp)",
  "kernel": "$release",
  "busybox": "$(busybox_version)",
  "vmlinuz_bytes": $(stat -c %s "$image/vmlinuz"),
  "initrd_bytes": $(stat -c %s "$image/initrd"),
  "data": [$sizes]
}
JSON
mv "$image" "$out"
say "made $out (kernel $release)"
