# shellcheck shell=bash
# QEMU of Debian's backports, unpacked into a folder. Sourced, never run.

# shellcheck source=images/aside.sh
. "$(dirname "${BASH_SOURCE[0]}")/aside.sh"

readonly QEMU10_SUITE=bookworm-backports

# A folder `bin` with a `qemu-system-x86_64` that finds its own firmware. Whole or not at all: the first command that fails ends it, and its
# caller, under `set -e`. So nobody may call it in a condition, where bash ignores that.
qemu10_unpack() { # FOLDER
    local folder=$1 work
    [ -x "$folder/bin/qemu-system-x86_64" ] && return
    mkdir -p "$(dirname "$folder")" || die "cannot make $(dirname "$folder"): set GODWIT_QEMU10 to a directory that can be written"
    work=$(mktemp -d "$folder.XXXXXX")
    (
        trap 'rm -rf "$work"' EXIT
        mkdir -p "$work/debs" "$work/made/root" "$work/made/bin"
        say "fetching QEMU of $QEMU10_SUITE"
        aside_update "$work" deb "$QEMU10_SUITE"
        cd "$work/debs"
        aside_apt "$work" download {qemu-system-x86,qemu-system-common,qemu-system-data,seabios}"/$QEMU10_SUITE" ||
            die "cannot download qemu-system-x86 of $QEMU10_SUITE: apt's message is above"
        for package in ./*.deb; do dpkg-deb -x "$package" "$work/made/root"; done
        cat >"$work/made/bin/qemu-system-x86_64" <<PROGRAM
#!/bin/sh
root=$folder/root
exec "\$root/usr/bin/qemu-system-x86_64" -L "\$root/usr/share/qemu" -L "\$root/usr/share/seabios" -L /usr/share/qemu -L /usr/share/seabios "\$@"
PROGRAM
        chmod 755 "$work/made/bin/qemu-system-x86_64"
        # What is wrong with it shows here, not in a guest's log.
        missing=$(ldd "$work/made/root/usr/bin/qemu-system-x86_64" | awk '/not found/ { print $1 }')
        [ -z "$missing" ] || die "QEMU of $QEMU10_SUITE lacks $missing: install them by apt-get, then run this again"
        mv -T "$work/made" "$folder"
    )
}
