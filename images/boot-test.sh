#!/usr/bin/env bash
# images/boot-test.sh [--vcpus N] [--memory-kib N] [--cpu MODEL] [--append WORDS]
#                     [--initrd FILE] [--images DIR] [--timeout S] [--verbose]
#
# Boots the tiny guest under emulation, as the lab does, and prints how many
# seconds went by until GODWIT-GUEST-READY. Fails after 90 s (--timeout), with
# the console's last lines. --initrd tries one with a load program appended.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=images/lib.sh
. "$here/lib.sh"
# shellcheck source=images/guest.sh
. "$here/guest.sh"

memory_kib=524296 # not a multiple of 256 KiB: QEMU 7.2 would lose dirty pages
verbose=no
while [ $# -gt 0 ]; do
    case $1 in
        --verbose) verbose=yes; shift; continue ;;
        --vcpus | --memory-kib | --cpu | --append | --initrd | --images | --timeout) ;;
        *) die "unknown option $1: see the head of $0" ;;
    esac
    take_option "$@"
    shift 2
done

start_guest tiny data-64.raw 1G "$memory_kib"
await_console '^GODWIT-GUEST-READY' "$timeout" >/dev/null
elapsed=$(seconds_since "$start")
[ "$verbose" = no ] || tr -d '\r' <"$work/console" >&2
printf 'tiny: ready after %s s (%s vCPU, -cpu %s); %s\n' "$elapsed" "$vcpus" "$cpu" \
    "$(await_console '^GODWIT-GUEST-INFO' 1 | sed 's/^GODWIT-GUEST-INFO //')"
