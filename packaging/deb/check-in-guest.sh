#!/bin/bash
# packaging/deb/check-in-guest.sh FOLDER
#
# Runs as root inside a Debian guest, with FOLDER holding a local archive of
# the packages and of what they depend on, and FOLDER/upgrade the same packages
# in a later version. Each line DEB-CHECK says what was found, and how long it
# took; scripts/deb-guest.sh reads them.
# shellcheck disable=SC2015 # say_state is meant for whichever of them failed
set -uo pipefail
packages=$1
export DEBIAN_FRONTEND=noninteractive LC_ALL=C

now() { local up; read -r up _ </proc/uptime; printf '%s' "$up"; }
failed=0
check() { # NAME COMMAND...: in this shell, so that it may set variables
    local name=$1 begin status=ok
    shift
    begin=$(now)
    "$@" >/tmp/check.log 2>&1 || status=FAILED
    printf '\nDEB-CHECK %s %s %s\n' "$name" "$status" "$(awk "BEGIN { print $(now) - $begin }")"
    [ "$status" = ok ] || { failed=1; tail -n 30 /tmp/check.log; }
}
until_true() { # SECONDS COMMAND...
    local end=$(($(date +%s) + $1))
    shift
    until "$@"; do
        [ "$(date +%s)" -lt "$end" ] || return 1
        sleep 0.5
    done
}
say_state() {
    systemctl --no-pager status godwit-controller godwit-node
    journalctl --no-pager -n 40 -u godwit-controller -u godwit-node
    return 1
}
apt() {
    apt-get -qq -y -o Dir::Etc::sourcelist="$packages/local.list" -o Dir::Etc::sourceparts=- \
        -o APT::Install-Recommends=false "$@"
}
traces() { # of the packages, on this machine
    find /etc /usr /lib/systemd /var /run -xdev -path '*godwit*' \
        ! -path '/var/lib/dpkg/*' ! -path '/var/cache/*' ! -path '/var/log/*' 2>/dev/null
    getent passwd godwit
    getent group godwit
    pgrep -a -x godwit
    pgrep -a qemu-system
    ip -o link | grep -o ' gw[^ :]*'
    true
}
property() { systemctl show --property="$2" --value "godwit-$1"; }
active() { systemctl is-active --quiet "godwit-$1"; }
restarted() { # DAEMON OLD-PID
    local pid
    pid=$(property "$1" MainPID)
    active "$1" && [ "$pid" != 0 ] && [ "$pid" != "$2" ]
}
guest() { pgrep -f 'qemu-system.*/run/godwit/vms/' | head -n 1; }

# ---- Installed: nothing runs, since there is no certificate yet -------------------

traces | sort >/tmp/before
install() { apt update && apt install godwit-controller godwit-node; }
check install install
idle() { ! active controller && ! active node && [ -z "$(systemctl --failed --no-legend)" ]; }
check installed-and-idle idle
enabled() { systemctl is-enabled godwit-controller godwit-node; }
check enabled enabled
documents() { man -w godwit-node 2>/dev/null || ls /usr/share/man/man1/godwit-node.1.gz || [ -e /etc/dpkg/dpkg.cfg.d ]; godwit --version && bash -c '. /usr/share/bash-completion/completions/godwit'; }
check documents documents

# ---- Enrolled -------------------------------------------------------------------

# As an operator does it: the deployment, its controller, a token for a host, and the host enrols with that.
export HOME=/root
init() {
    godwit init --state /var/lib/godwit/controller &&
        mkdir -p /root/.config && cp -r /var/lib/godwit/controller/admin /root/.config/godwit
}
check init init
configure() {
    echo 'address = "10.99.0.11"' >>/etc/godwit/node.toml
    godwit config check /etc/godwit/node.toml && godwit config check /etc/godwit/controller.toml
}
check configure configure
start_controller() { systemctl start godwit-controller || say_state; }
check controller-starts start_controller
node_waits() { systemctl start godwit-node && ! active node; }
check node-does-not-start-without-a-certificate node_waits
enrol() { (umask 077 && godwit host token host1 >/root/token) && godwit enroll --token-file /root/token --state /var/lib/godwit/node; }
check enrol enrol
once() { ! godwit enroll --token-file /root/token --state /root/again && [ ! -e /root/again ] && rm /root/token; }
check token-is-good-once once
start_node() { systemctl start godwit-node || say_state; }
check node-starts start_node
both_up() { active controller && active node || say_state; }
check both-up both_up
[ "$failed" = 0 ] || { printf '\nDEB-GUEST failed\n'; exit 1; }
knows() { godwit site add here && godwit host add host1 --site here --api 10.99.0.11:7410 && godwit host ls && ! godwit host ls --json | grep -q '"error":"'; }
check host-known knows
# It was not made by hand: it knows where its next certificate comes from.
renews() { godwit host show host1 --json | grep -q '"certificate_renews": *true'; }
check certificate-renews-by-itself renews
status() { property controller StatusText; property node StatusText; property node StatusText | grep -q 'VMs known'; }
told() { until_true 30 status; }
check status-text told

# ---- A guest, under the unit's limits ------------------------------------------------

create() { godwit vm create web --at host1 --memory 32776K --cpu qemu64 --machine pc --accel tcg --disk root=16M --start || say_state; }
check guest-starts create
outlives() { [ "$(guest)" = "$qemu" ] && [ -n "$qemu" ]; }
qemu=$(guest)
check guest-runs outlives

# ---- Hung, and killed -----------------------------------------------------------------

for daemon in controller node; do
    pid=$(property $daemon MainPID)
    hang() { [ "$pid" != 0 ] && kill -STOP "$pid" && until_true 150 restarted "$daemon" "$pid" || say_state; }
    check "$daemon-hung-and-restarted" hang
    by_watchdog() { journalctl --no-pager -u "godwit-$daemon" | grep -i 'watchdog timeout'; }
    check "$daemon-by-its-watchdog" by_watchdog
    pid=$(property $daemon MainPID)
    kill_it() { [ "$pid" != 0 ] && kill -KILL "$pid" && until_true 60 restarted "$daemon" "$pid" || say_state; }
    check "$daemon-killed-and-restarted" kill_it
done
check guest-outlived-that outlives
answers() { until_true 30 godwit vm show web; }
check guest-known-as-before answers

# ---- Upgraded, removed, purged ----------------------------------------------------------

pid=$(property node MainPID)
upgrade() { dpkg -i "$packages"/upgrade/*.deb && until_true 60 restarted node "$pid" && until_true 60 active controller || say_state; }
check upgrade upgrade
check guest-outlived-the-upgrade outlives
kept() { grep -q '^address = ' /etc/godwit/node.toml; }
check configuration-kept kept
refused() { ! apt remove godwit-node && outlives; }
check removal-refused-while-a-guest-runs refused
check node-goes-on until_true 30 active node
gone() { [ -z "$(guest)" ]; }
ended() { godwit vm stop web --force && until_true 30 gone; }
check guest-stopped ended
held() { # by a process such as keeps a component
    local status=1
    env -i GODWIT_COMPONENT=/run/godwit/components/1.pid sleep 600 &
    apt remove godwit-node || status=0
    kill $! && wait $!
    return $status
}
check removal-refused-while-a-component-is-there held
remove() { apt remove godwit godwit-controller godwit-node && ! active node && ! active controller; }
check remove remove
state() { [ -e /var/lib/godwit/node/credentials/key.pem ] && [ -e /var/lib/godwit/controller/controller.redb ] && [ -e /var/lib/godwit/controller/ca/ca-key.pem ] && [ -e /etc/godwit/node.toml ]; }
check state-kept-on-remove state
check purge apt purge godwit godwit-controller godwit-node
nothing() { traces | sort >/tmp/after; diff <(grep -v ^/run/godwit /tmp/before) <(grep -v ^/run/godwit/ /tmp/after); }
check nothing-left nothing
[ "$failed" = 0 ] && printf '\nDEB-GUEST done\n' || printf '\nDEB-GUEST failed\n'
