#!/usr/bin/env bash
# images/data.sh OUTFILE MIB
#
# Makes a guest's disk template: an ext4 file system that holds MIB of real
# content and is read-only to the guest. OUTFILE is exactly as long as the file
# system, so whoever puts it on a larger disk knows where free space begins.
# Does nothing when OUTFILE is there; never leaves half of one.
#
# Of the content, 5/8 are files of this machine's /usr (text, programs,
# archives), 2/8 are structured records, 1/8 is incompressible. They are drawn
# so that a smaller template is much the same mix as a larger one, and so that
# the same /usr gives the same bytes: codecs are compared across runs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=images/lib.sh
. "$here/lib.sh"

[ $# = 2 ] || die "usage: images/data.sh OUTFILE MIB"
out=$1
mib=$2
if ! [[ $mib =~ ^[0-9]{1,5}$ && $mib -ge 8 ]]; then
    die "MIB is $mib: give a number from 8 to 99999"
fi
[ ! -e "$out" ] || exit 0
need_root images/data.sh
need_command mke2fs e2fsprogs
need_command cpio cpio
need_command openssl openssl
directory=$(dirname "$out")
need_space_mib "$directory" $((mib * 5 / 2))

work=$(mktemp -d "$directory/.data.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
trap 'die "line $LINENO failed: $BASH_COMMAND"' ERR
stage=$work/stage
mkdir -p "$stage/files" "$stage/records" "$stage/noise"

perl "$here/choose-files.pl" $((mib * 5 / 8 << 20)) >"$work/chosen"
(cd / && cpio --quiet --null --pass-through --make-directories --preserve-modification-time "$stage/files" <"$work/chosen") ||
    die "cannot copy files of /usr to $stage: is the disk full?"

# Records take their own share and what /usr was too small to give.
files=$(find "$stage/files" -type f -printf '%s\n' | awk '{ s += $1 } END { printf "%d", s }')
records=$(((mib * 7 / 8 << 20) - files))
noise=$(((mib << 20) - files - records))
perl "$here/records.pl" "$records" | split -b 8M -d -a 4 - "$stage/records/records-"
{ openssl enc -aes-128-ctr -K 676f64776974206e6f69736520763120 -iv 00000000000000000000000000000000 \
    </dev/zero 2>/dev/null || true; } | head -c "$noise" | split -b 8M -d -a 4 - "$stage/noise/noise-"

find "$stage" -exec touch --no-dereference --date="@$IMAGE_EPOCH" {} +

# No journal and no room to grow: the guest only reads. The size is the content
# in blocks, plus inodes of 256 bytes, plus 1 % and 4 MiB for extents, bitmaps
# and block group descriptors.
inodes=$(($(find "$stage" | wc -l) + 64))
blocks=$(find "$stage" -printf '%s\n' | awk '{ b += int(($1 + 4095) / 4096) } END { printf "%d", b }')
blocks=$(((blocks + inodes / 16) * 101 / 100 + 1024))
image=$work/image
: >"$image"
E2FSPROGS_FAKE_TIME=$IMAGE_EPOCH mke2fs -q -t ext4 -b 4096 -I 256 -N "$inodes" -m 0 \
    -O '^has_journal,^resize_inode' -L godwit-data -U 676f6477-6974-4000-8000-000000000001 \
    -E 'hash_seed=676f6477-6974-4000-8000-000000000002,lazy_itable_init=0,nodiscard,root_owner=0:0' \
    -d "$stage" "$image" "$blocks" >&2 ||
    die "mke2fs could not make the $mib MiB template: is $directory full?"
# mke2fs copies when the staging copy's inodes were last read and changed, which
# nobody can set beforehand; every other byte is reproducible.
seq 11 "$inodes" | awk -v t="$IMAGE_EPOCH" '{
    print "set_inode_field <" $1 "> atime @" t
    print "set_inode_field <" $1 "> ctime @" t }' >"$work/times"
E2FSPROGS_FAKE_TIME=$IMAGE_EPOCH debugfs -w -f "$work/times" "$image" >/dev/null 2>"$work/debugfs" ||
    die "debugfs failed on the template: $(tail -n 1 "$work/debugfs")"
mv "$image" "$out"
say "made $out ($mib MiB of content: $((files >> 20)) MiB files, $((records >> 20)) MiB records, $((noise >> 20)) MiB noise)"
