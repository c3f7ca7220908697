#!/bin/sh
# A Ceph cluster of one machine for as long as a command runs: a monitor and an OSD that keeps its objects in memory.
#
#   scripts/ceph.sh COMMAND [ARGUMENT...]
#
# The command finds the cluster by $CEPH_CONF; it has the pool `volumes`, and the users `admin` and `godwit`, who may use that pool alone.
# Everything listens on $CEPH_ADDRESS (127.0.0.1 if not said) and lies in a folder of its own, and is gone afterwards, also when the command fails or is
# interrupted. Needs root, and Debian's packages ceph-mon, ceph-osd and ceph-common (installed if they are not there).
set -eu

[ $# -gt 0 ] || { sed -n 's/^# \{0,1\}//p' "$0" | sed -n '2,8p' >&2; exit 2; }
"$(dirname "$0")/setup.sh" --quiet ceph >&2

dir=$(mktemp -d "${TMPDIR:-/tmp}/godwit-ceph.XXXXXX")
pids=""
end() {
    trap - EXIT
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for pid in $pids; do
        for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
    rm -rf "$dir"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

address=${CEPH_ADDRESS:-127.0.0.1}
fsid=$(cat /proc/sys/kernel/random/uuid)
# Ports that nobody has: others on this machine may have a cluster.
port=$((20000 + $$ % 20000))
cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $fsid
mon host = [v2:$address:$port]
ms bind port min = $((port + 1))
ms bind port max = $((port + 100))
public addr = $address
public network = $address/32
cluster network = $address/32
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $dir/keyring
log file = $dir/\$name.log
pid file = $dir/\$name.pid
admin socket = $dir/\$name.\$pid.sock
run dir = $dir
crash dir = $dir/crash
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data = $dir/mon
mon data avail crit = 1
mon data avail warn = 1
osd data = $dir/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd crush chooseleaf type = 0
osd crush update on start = false
osd max object name len = 256
osd max object namespace len = 64
CONF
export CEPH_CONF="$dir/ceph.conf"

quiet() { "$@" >"$dir/said" 2>&1 || { cat "$dir/said" >&2; echo "ceph.sh: $1 failed" >&2; exit 1; }; }
quiet ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
quiet ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
quiet ceph-authtool "$dir/keyring" --gen-key -n client.godwit --cap mon 'allow r' --cap osd 'allow rwx pool=volumes'
quiet ceph-authtool "$dir/keyring" --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
quiet monmaptool --create --fsid "$fsid" --addv a "[v2:$address:$port]" "$dir/monmap"
mkdir "$dir/mon" "$dir/osd" "$dir/crash"
quiet ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
ceph-mon -f -i a >"$dir/mon.out" 2>&1 &
pids="$!"
quiet timeout 60 ceph auth import -i "$dir/keyring"
uuid=$(cat /proc/sys/kernel/random/uuid)
quiet timeout 60 ceph osd new "$uuid" 0
quiet timeout 60 ceph auth import -i "$dir/keyring"
quiet ceph-osd -i 0 --mkfs --osd-uuid "$uuid" --keyring "$dir/keyring"
ceph-osd -f -i 0 >"$dir/osd.out" 2>&1 &
pids="$! $pids"
quiet timeout 60 ceph osd crush add osd.0 1 root=default host=one
quiet timeout 60 ceph osd pool create volumes 8
for left in $(seq 30 -1 0); do
    timeout 5 rados --pool volumes put ready "$dir/ceph.conf" 2>/dev/null && break
    [ "$left" -gt 0 ] || { tail -n 20 "$dir/osd.out" >&2; echo "ceph.sh: the cluster takes no objects" >&2; exit 1; }
done
rados --pool volumes rm ready
"$@"
