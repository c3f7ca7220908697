# shellcheck shell=bash
# libnbd's source package, unpacked into a folder, for its interop tests. Sourced, never run.

# shellcheck source=images/aside.sh
. "$(dirname "${BASH_SOURCE[0]}")/aside.sh"

# That of this machine's release: the library that its tests are built with is this machine's. Whole or not at all, and not in a condition: as
# `qemu10_unpack`.
libnbd_unpack() { # FOLDER
    local folder=$1 work suite
    [ -d "$folder/interop" ] && return
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-sid}")
    mkdir -p "$(dirname "$folder")" || die "cannot make $(dirname "$folder"): set GODWIT_IMAGES to a directory that can be written"
    work=$(mktemp -d "$folder.XXXXXX")
    (
        trap 'rm -rf "$work"' EXIT
        mkdir "$work/source"
        say "fetching libnbd's source of $suite"
        aside_update "$work" deb-src "$suite"
        cd "$work/source"
        aside_apt "$work" source libnbd || die "cannot fetch libnbd's source of $suite: apt's message is above"
        mv -T libnbd-*/ "$folder"
    )
}
