#!/usr/bin/env bash
# scripts/interop-libnbd.sh GODWIT: libnbd's own interop tests (interop/ of its source) with our NBD server in the place of the servers that they
# are written for. Needs what `scripts/setup.sh libnbd` installs and unpacks.
#
# Each program is built as interop/Makefile.am builds it for qemu-nbd, the server that is the most like ours, but for these:
#   dirty-bitmap      asks for a bitmap by QEMU's name, of a qcow2 image; what we know of writes is no context of NBD's
#   structured-read   asserts that a read of a qcow2 image with clusters of 512 bytes comes as a hole and as data ("relies on qemu-nbd's
#                     behavior"); ours sends data, and so does qemu-nbd where the file is raw
#   ...-tls-psk       TLS by a shared password, which our TLS has not
#   interop-qemu-block-size: of its four cases two are of an image whose format QEMU has to guess, and one wants sizes told to a client that did
#                     not ask, as QEMU does; ours tells who asks, as the protocol has it. The fourth is run
# What nbdkit and nbd-server are tried with besides: TLS that is offered and not demanded, which is run; and to be started with the client as
# standard input, which ours is not: the tests over socket activation ask the same.
set -euo pipefail
godwit=$(realpath "${1:?usage: $0 GODWIT}")
images=${GODWIT_IMAGES:-/var/cache/godwit-lab/images}
source=$(dirname "${images%/}")/libnbd
[ -d "$source/interop" ] || { echo "interop-libnbd: $source is missing: run scripts/setup.sh libnbd" >&2; exit 1; }
folder=$(mktemp -d)
group=''
# `timeout` leads a group of processes. The server of a test that was aborted is in it still.
end_group() {
    [ -z "$group" ] || kill -- "-$group" 2>/dev/null || true
    group=''
}
trap 'end_group; rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM HUP

# As in a build of libnbd: tests run in interop/, and certificates are where its own script puts them.
mkdir "$folder"/{interop,tests,bin}
cd "$folder/interop"
: >../config.h
cp "$source"/tests/requires.h ../tests
sed "s|@abs_top_srcdir@|$source|" "$source/tests/functions.sh.in" >../tests/functions.sh
SRCDIR=$source/tests CERTTOOL=certtool "$source/tests/make-pki.sh" ../tests/pki >log 2>&1 || { cat log; exit 1; }
# Their files lie here, and not in /tmp, where what is tracked of them would stay.
for file in interop.c list-exports.c socket-activation.c interop-qemu-block-size.sh interop-qemu-storage-daemon.sh; do
    sed 's|/tmp/||' "$source/interop/$file" >"$file"
done

run() { # NAME COMMAND...: one that says that it skips itself (77) has not passed
    local name=$1 code=0
    shift
    LIBNBD_DEBUG=1 timeout -k 5 120 "$@" >log 2>&1 </dev/null &
    group=$!
    wait "$group" || code=$?
    end_group
    if [ "$code" != 0 ]; then
        cat log >&2
        echo "interop-libnbd: $name: status $code" >&2
        exit 1
    fi
    echo "ok $name"
}

test_of() { # NAME SOURCE SERVER-PARAMS FLAG...
    local name=$1 from=$2 params=$3
    shift 3
    cc -Wall -I.. -I../tests -I"$source/common/include" -DSOCKET_ACTIVATION=1 -DNEEDS_TMPFILE=1 \
        -DSERVER="\"$godwit\"" -DSERVER_PARAMS="\"volume\", \"serve\", $params" "$@" -o "$name" "$from.c" -lnbd
    run "$name" "./$name"
}

tls='"--tls-creds", "../tests/pki", TMPFILE'
for tracking in '' no-track; do
    file=${tracking:+\"--$tracking\", }TMPFILE
    test_of "interop${tracking:+-$tracking}" interop "$file" -DEXPORT_NAME=TMPFILE
    test_of "socket-activation${tracking:+-$tracking}" socket-activation "${file/TMPFILE/tmpfile}"
done
test_of interop-default-export interop TMPFILE -DEXPORT_NAME='""'
test_of interop-tls-certs interop "$tls" -DEXPORT_NAME=TMPFILE -DCERTS=1 -DTLS_MODE=LIBNBD_TLS_REQUIRE
test_of interop-tls-certs-allow-enabled interop "$tls" -DEXPORT_NAME='""' -DCERTS=1 -DTLS_MODE=LIBNBD_TLS_ALLOW
test_of interop-tls-certs-allow-fallback interop TMPFILE -DEXPORT_NAME='""' -DCERTS=1 -DTLS_MODE=LIBNBD_TLS_ALLOW -DTLS_FALLBACK=1
# Its file has 1024 bytes, which cannot be tracked.
test_of list-exports list-exports '"--no-track", TMPFILE' -DEXPORTS=TMPFILE -DDESCRIPTIONS='""'

# Two are scripts, which start QEMU's programs: ours under their names. Their client is written in Debian's Python.
cat >../bin/qemu-nbd <<'PROGRAM'
#!/bin/bash
# -k SOCKET -f raw FILE
[ "$1" = -k ] || exit 0
exec "$GODWIT" volume serve "$5" --socket "$2"
PROGRAM
cat >../bin/qemu-storage-daemon <<'PROGRAM'
#!/bin/bash
# --blockdev ... --nbd-server addr.type=fd,addr.str=N --export ...; the file's name is in $f as well
[ "$3" = --nbd-server ] || exit 0
fd=${4##*=}
exec env LISTEN_PID=$$ LISTEN_FDS=1 "$GODWIT" volume serve "$f" 3<&"$fd"
PROGRAM
chmod +x ../bin/*
export GODWIT=$godwit PATH=$folder/bin:/usr/bin:$PATH QEMU_STORAGE_DAEMON=$folder/bin/qemu-storage-daemon
# qemu-nbd goes when its client has gone; ours is told to, and stays in this test's group, to be ended with it.
sed -i -e 's/timeout 60s/timeout --foreground 60s/' -e "/^run_test ''/d" -e '/^run_test .* False/d' -e 's/^    wait \$pid/    kill $pid; wait $pid/' interop-qemu-block-size.sh
run interop-qemu-block-size bash interop-qemu-block-size.sh
# The disk is raw, and how the server ends is seen.
sed -i -e 's/-f qcow2/-f raw/' -e 's/^os\.kill(pid, signal\.SIGTERM)/&\nassert os.waitpid(pid, 0)[1] == 0/' interop-qemu-storage-daemon.sh
run interop-qemu-storage-daemon bash interop-qemu-storage-daemon.sh
echo "interop-libnbd: all passed"
