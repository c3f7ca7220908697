#!/usr/bin/env bash
# scripts/debian-kernel.sh [--vcpus N] [--memory-mib N] [--cpu MODEL] [--seconds N] COMMAND [WORD...]
#
# Runs a command as root on Debian's own kernel with all its modules, whatever kernel this machine has: in a guest under emulation that sees
# this machine's files, what was built here and what is installed here among them, read only, under a layer in its memory. Nothing is
# installed for it, and nothing of it is left. It has no network but its own; words and folder are as here, the environment is not. Output
# and exit status are the command's; 124 is said when it took longer than SECONDS (1800), 125 when the guest did not get that far.
#
# Needs root, as whoever asks can read all of this machine in the guest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=images/lib.sh
. "$root/images/lib.sh"
# shellcheck source=images/guest.sh
. "$root/images/guest.sh"

vcpus=2
memory_mib=2048
seconds=1800
while [ $# -gt 0 ]; do
    case $1 in
        --vcpus | --memory-mib | --cpu | --seconds) ;;
        --*) die "unknown option $1: see the head of $0" ;;
        *) break ;;
    esac
    take_option "$@"
    shift 2
done
[ $# -gt 0 ] || die "no command: see the head of $0"
need_root scripts/debian-kernel.sh
need_command cpio cpio
need_command modprobe kmod

# ---- A kernel, and an initrd that mounts this machine's files -----------------------

# Not the cloud kernel of the guest images, which cannot mount what is shared with it (9p).
real_kernel_package() {
    apt-cache depends linux-image-amd64 2>/dev/null |
        awk '/Depends: linux-image-[0-9]/ { print $2; found = 1; exit } END { exit !found }'
}

prepare_guest
release=$(unpack_kernel "$work/kernel")
tree=$work/tree
mkdir -p "$tree" "$work/shared"
add_guest_init "$tree" "$root/images/machine-init"
add_modules "$tree" "$work/kernel" "$release" virtio_pci virtio-rng 9pnet_virtio 9p overlay
pack_initrd "$tree" "$work/initrd"

# Process 1 of the guest: what a system does before it runs programs, as far as they ask for it.
printf '%q ' "$@" >"$work/shared/command"
cat >"$work/shared/begin" <<BEGIN
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
ip link set lo up
modprobe tun
cd $(printf '%q' "$PWD")
bash /run/shared/command </dev/null >>/run/shared/output 2>&1
echo \$? >/run/shared/status
sync
busybox poweroff -f
sleep 60
BEGIN
: >"$work/shared/output"

# ---- The guest ---------------------------------------------------------------------

# shellcheck disable=SC2034  # read by guest.sh
devices=(
    -virtfs "local,path=/,mount_tag=machine,security_model=none,readonly=on,multidevs=remap"
    -virtfs "local,path=$work/kernel/lib/modules,mount_tag=modules,security_model=none,readonly=on"
    -virtfs "local,path=$work/shared,mount_tag=shared,security_model=none"
)
boot_guest "$work/kernel/boot/vmlinuz-$release" "$work/initrd" $((memory_mib * 1024)) ""
say "kernel $release, $vcpus vCPUs, -cpu $cpu"
tail -n +1 -f --pid="$qemu" "$work/shared/output" &
telling=$!
deadline=$((SECONDS + seconds))
while kill -0 "$qemu" 2>/dev/null; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        tail -n 20 "$work/console" "$work/stderr" >&2 || true
        say "it did not end within $seconds s (its console's last words are above)"
        exit 124
    fi
    sleep 0.5
done
wait "$telling" || true
if [ ! -s "$work/shared/status" ]; then
    tail -n 20 "$work/console" "$work/stderr" >&2 || true
    say "the guest did not come to the command's end (its last words are above)"
    exit 125
fi
exit "$(cat "$work/shared/status")"
