#!/usr/bin/env bash
# images/debian-check.sh [--verbose]
#
# Boots the debian guest under emulation (two vCPUs, 1 GiB) and asks of it, over
# the serial console, what the workloads will ask: PostgreSQL and pgbench, a C
# compiler, the first object of a kernel compile, Java. Takes a few minutes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=images/lib.sh
. "$here/lib.sh"
# shellcheck source=images/guest.sh
. "$here/guest.sh"

verbose=no
case ${1:-} in
    '') ;;
    --verbose) verbose=yes ;;
    *) die "unknown option $1: see the head of $0" ;;
esac
vcpus=2

failed=0
check() { # NAME SECONDS COMMAND
    local begin line
    begin=$(date +%s%N)
    # The console echoes what is typed: the marker must not be readable in it.
    printf '( %s ); echo CHECK"-"%s $?\n' "$3" "$1" >&3
    line=$(await_console "^CHECK-$1 [0-9]+" "$2")
    if [ "$line" = "CHECK-$1 0" ]; then
        printf 'debian: %s: ok, %s s\n' "$1" "$(seconds_since "$begin")"
    else
        printf 'debian: %s: FAILED (%s)\n' "$1" "$line"
        failed=1
    fi
}

start_guest debian data.raw 10G 1048584
await_console '^GODWIT-GUEST-READY' 120 >/dev/null
printf 'debian: ready after %s s; %s\n' "$(seconds_since "$start")" \
    "$(await_console '^GODWIT-GUEST-INFO' 1 | sed 's/^GODWIT-GUEST-INFO //')"
# The prompt, without bash's paste brackets, which would precede the markers.
await_console '^Linux godwit-guest' 60 >/dev/null
printf 'export TERM=dumb PS1=; bind "set enable-bracketed-paste off"\n' >&3
check shell 60 'true'
# shellcheck disable=SC2016  # for the guest's shell
check units 60 '[ -z "$(systemctl --failed --no-legend)" ]'
check address 60 'ip addr show eth0 | grep -q "inet 10.99.0.11/16" && ip link show eth0 | grep -q "mtu 1450"'
check pgbench-init 300 'cd /tmp && su postgres -c "createdb bench && pgbench -i -q -s 1 bench"'
check pgbench-run 120 'cd /tmp && su postgres -c "pgbench -n -T 5 -c 2 -j 2 bench"'
check gcc 120 'cd /tmp && echo "int puts(const char *); int main(void) { return puts(\"hello\") < 0; }" >h.c && gcc -O2 h.c -o h && ./h'
check java 180 'java -version'
check kernel-compile 600 'make -s -j2 -C /usr/src/linux lib/ctype.o'
[ "$verbose" = no ] || tr -d '\r' <"$work/console" >&2
[ "$failed" = 0 ] || die "the debian guest failed a check; run with --verbose for its console"
