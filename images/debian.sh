#!/usr/bin/env bash
# images/debian.sh OUTDIR
#
# Makes the debian guest in OUTDIR/debian: vmlinuz, initrd, data.raw (the root
# disk, 6 GiB, sparse) and manifest.json. A full Debian 12 with what the papers'
# workloads need: PostgreSQL with pgbench, a compiler and the kernel's sources
# ready for `make` in /usr/src/linux, a Java runtime. It boots from the same
# kernel and the same /init as the tiny guest, which makes the network and finds
# the load program before it hands over to systemd: so there is no package of a
# kernel inside, and no initramfs to generate at each install.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=images/lib.sh
. "$here/lib.sh"

if [ "${1:-}" = --stamp ]; then
    recipe_stamp "$here"/{lib.sh,debian.sh,guest-init}
    exit
fi
[ $# = 1 ] || die "usage: images/debian.sh OUTDIR"
need_root images/debian.sh
need_command modprobe kmod
need_command cpio cpio
need_command mke2fs e2fsprogs
need_command mmdebstrap mmdebstrap
mkdir -p "$1"
need_space_mib "$1" 10240
out=$(cd "$1" && pwd)/debian
[ ! -e "$out" ] || die "$out is there already: remove it first, or let scripts/setup.sh replace it"

work=$(mktemp -d "$(dirname "$out")/.debian.XXXXXX")
# mmdebstrap unmounts what it mounted, also when it fails; --one-file-system is
# for the case that it was killed and could not.
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM HUP
trap 'die "line $LINENO failed: $BASH_COMMAND"' ERR
image=$work/debian
root=$work/root
tree=$work/tree
mkdir -p "$image" "$tree"

release=$(unpack_kernel "$work/kernel")
cp "$work/kernel/boot/vmlinuz-$release" "$image/vmlinuz"

# ---- The system --------------------------------------------------------------

packages=(
    systemd-sysv udev dbus kmod iproute2 iputils-ping procps psmisc less
    postgresql postgresql-contrib
    gcc make bc flex bison libc6-dev libelf-dev libssl-dev cpio rsync linux-source-6.1 xz-utils
    openjdk-17-jre-headless
)

# Exactly this machine's Debian archives, mirrors and security updates included,
# and nothing that others added to its apt.
debian_sources() {
    # shellcheck disable=SC2016  # the dollars are apt's
    apt-get indextargets --format '$(ORIGIN) $(CREATED_BY) deb $(REPO_URI) $(RELEASE) $(COMPONENT)' |
        sed -n 's/^Debian Packages //p' | grep . | sort -u
}
debian_sources >"$work/sources" 2>/dev/null || apt_with_update debian_sources >"$work/sources" ||
    die "apt knows no Debian archive: look at /etc/apt/sources.list and /etc/apt/sources.list.d"
[ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ] ||
    sed -i 's|^deb |deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] |' "$work/sources"

say "installing Debian 12 (a few hundred megabytes of packages)"
mkdir "$work/tmp"
LC_ALL=C.UTF-8 TMPDIR=$work/tmp nice mmdebstrap --quiet --mode=root --variant=essential --format=directory \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --include="apt,$(IFS=,; echo "${packages[*]}")" \
    bookworm "$root" - <"$work/sources" >&2 ||
    die "mmdebstrap failed: its message is above"

mkdir -p "$root/usr/lib/modules"
cp -a "$work/kernel/lib/modules/$release" "$root/usr/lib/modules/"

# Kernel sources, configured: a compile is one `make -C /usr/src/linux` away.
tar -C "$root/usr/src" -xf "$root"/usr/src/linux-source-6.1.tar.xz
rm "$root"/usr/src/linux-source-6.1.tar.xz
ln -s linux-source-6.1 "$root/usr/src/linux"
chroot "$root" make --silent -C /usr/src/linux tinyconfig >/dev/null

printf 'godwit-guest\n' >"$root/etc/hostname"
printf '127.0.0.1 localhost godwit-guest\n' >"$root/etc/hosts"
printf '/dev/vda / ext4 defaults,noatime 0 0\n' >"$root/etc/fstab"
: >"$root/etc/machine-id"
passwd --root "$root" --delete root >/dev/null

# The interface is named and configured by /init already.
mkdir -p "$root/etc/systemd/network" "$root/etc/systemd/system/serial-getty@ttyS0.service.d"
ln -s /dev/null "$root/etc/systemd/network/99-default.link"
cat >"$root/etc/systemd/system/serial-getty@ttyS0.service.d/autologin.conf" <<'UNIT'
# A guest of the lab, reachable from nowhere else: root without a password.
[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin root --noclear --keep-baud 115200 - $TERM
UNIT
cat >"$root/etc/systemd/system/godwit-load.service" <<'UNIT'
[Unit]
Description=Godwit's load program, given by the lab at boot
ConditionPathExists=/run/godwit/godwit-load

[Service]
ExecStart=/usr/bin/xargs --null --arg-file=/run/godwit/args /run/godwit/godwit-load
StandardOutput=tty
TTYPath=/dev/ttyS0
# Never restarted: a program that a move has hurt has to look hurt.
ExecStopPost=/bin/sh -c '{ echo; echo "GODWIT-LOAD-EXIT status=$EXIT_STATUS"; } >/dev/ttyS0'

[Install]
WantedBy=multi-user.target
UNIT
cat >"$root/etc/systemd/system/godwit-ready.service" <<'UNIT'
[Unit]
Description=Tells the lab that the guest is up
After=godwit-load.service postgresql@15-main.service
# Before the log-in, whose prompt would run into the lines that the lab reads.
Before=serial-getty@ttyS0.service

[Service]
Type=oneshot
ExecStart=/usr/local/sbin/godwit-ready

[Install]
WantedBy=multi-user.target
UNIT
cat >"$root/usr/local/sbin/godwit-ready" <<'SCRIPT'
#!/bin/sh
# Ready means that a client can connect: at most five seconds are spent on
# waiting for the load program's socket.
program=absent
if [ -e /run/godwit/godwit-load ]; then
    program=running
    pid=$(systemctl show --property=MainPID --value godwit-load)
    tries=25
    # 0A is the state of a listening socket; 1538 is PostgreSQL's port. New
    # processes are dear under emulation: one a turn.
    while [ "$tries" -gt 0 ] && ! awk '$4 == "0A" && $2 !~ /:1538$/ { found = 1 } END { exit !found }' /proc/net/tcp; do
        [ -d "/proc/$pid" ] || { program=dead; break; }
        sleep 0.2
        tries=$((tries - 1))
    done
fi
read -r uptime _ </proc/uptime
clock=$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)
{
    echo # ends what the load program may have begun
    echo "GODWIT-GUEST-INFO kernel=$(uname -r) clock=$clock $(cat /run/godwit/info) program=$program uptime_s=$uptime"
    echo GODWIT-GUEST-READY
} >/dev/ttyS0
SCRIPT
chmod 755 "$root/usr/local/sbin/godwit-ready"
systemctl --root="$root" --quiet enable godwit-load.service godwit-ready.service serial-getty@ttyS0.service
# What costs boot time under emulation and serves nothing in a guest that lives
# for minutes.
systemctl --root="$root" --quiet mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer \
    e2scrub_reap.service dpkg-db-backup.timer fstrim.timer systemd-tmpfiles-clean.timer getty@tty1.service \
    systemd-update-utmp.service systemd-random-seed.service systemd-pstore.service \
    systemd-networkd-wait-online.service modprobe@drm.service modprobe@efi_pstore.service \
    systemd-journal-flush.service systemd-binfmt.service sys-kernel-debug.mount sys-kernel-tracing.mount \
    dev-hugepages.mount dev-mqueue.mount proc-sys-fs-binfmt_misc.automount
mkdir -p "$root/etc/systemd/journald.conf.d"
printf '[Journal]\nStorage=volatile\nRuntimeMaxUse=16M\n' >"$root/etc/systemd/journald.conf.d/godwit.conf"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/*.log

# ---- Disk and initrd -----------------------------------------------------------

say "packing the root disk"
: >"$image/data.raw"
nice mke2fs -q -t ext4 -b 4096 -m 0 -L godwit-debian -U 676f6477-6974-4000-8000-000000000003 \
    -E 'lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0' \
    -d "$root" "$image/data.raw" 6G >&2 ||
    die "mke2fs could not make the root disk: is $(dirname "$out") full?"

add_guest_init "$tree" "$here/guest-init"
add_modules "$tree" "$work/kernel" "$release" "${GUEST_MODULES[@]}"
mkdir -p "$tree/etc"
: >"$tree/etc/switch-root"
pack_initrd "$tree" "$image/initrd"

version() { dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Version}' "$1"; }
cat >"$image/manifest.json" <<JSON
{
  "image": "debian",
  "stamp": "$("$here/debian.sh" --stamp)",
  "kernel": "$release",
  "busybox": "$(busybox_version)",
  "postgresql": "$(version postgresql-15)",
  "java": "$(version openjdk-17-jre-headless)",
  "gcc": "$(version gcc-12)",
  "linux_source": "$(version linux-source-6.1)",
  "vmlinuz_bytes": $(stat -c %s "$image/vmlinuz"),
  "initrd_bytes": $(stat -c %s "$image/initrd"),
  "data": [{"file": "data.raw", "content_mib": $(du -sm "$root" | cut -f 1), "fs_bytes": $(stat -c %s "$image/data.raw")}]
}
JSON
mv "$image" "$out"
say "made $out (kernel $release)"
