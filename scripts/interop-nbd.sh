#!/usr/bin/env bash
# scripts/interop-nbd.sh GODWIT: our NBD server under clients that others wrote. Needs what `scripts/setup.sh nbd` installs.
set -euo pipefail
godwit=$(realpath "${1:?usage: $0 GODWIT}")
folder=$(mktemp -d)
server=''
cleanup() {
    [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server"; } || true
    rm -rf "$folder"
}
trap cleanup EXIT
cd "$folder"
uri="nbd+unix:///?socket=$folder/socket"

start() { # OPTION ...
    rm -rf disk disk.godwit
    truncate -s 256M disk
    "$godwit" volume serve disk --socket socket "$@" &
    server=$!
    for _ in $(seq 500); do [ -S socket ] && return; sleep 0.02; done
    echo "interop-nbd: nobody listens" >&2
    return 1
}

stop() {
    kill "$server"
    wait "$server"
    server=''
}

for tracking in '' --no-track; do
    # shellcheck disable=SC2086
    start $tracking
    echo "-- fio: what it wrote is what it reads ${tracking:-with tracking}"
    for rw in randwrite write; do
        fio --name=verify --ioengine=nbd --uri="$uri" --rw=$rw --bsrange=4k-256k --iodepth=32 --size=256m --verify=crc32c \
            --do_verify=1 --verify_fatal=1 --output=fio.log || { cat fio.log; exit 1; }
    done
    echo "-- libnbd: each call, and what it may not ask"
    /usr/bin/python3 - "$uri" <<'PYTHON'
import errno, os, sys
import nbd

uri = sys.argv[1]
def connect():
    h = nbd.NBD()
    h.add_meta_context("base:allocation")
    h.set_strict_mode(0)  # What makes no sense has to be refused by the server.
    h.connect_uri(uri)
    return h

def refused(code, call):
    try:
        call()
    except nbd.Error as error:
        assert error.errnum == code, error
        return
    raise AssertionError("it was not refused")

a, b = connect(), connect()
size = a.get_size()
for can in ("can_flush", "can_fua", "can_trim", "can_zero", "can_fast_zero", "can_cache", "can_df", "can_multi_conn"):
    assert getattr(a, can)(), can
assert not a.is_read_only() and a.can_meta_context("base:allocation")

# Several connections see one disk, and a flush on one of them is for all.
block = os.urandom(65536)
a.pwrite(block, 123)
assert b.pread(len(block), 123) == block
b.flush()
a.zero(4096, 4096, nbd.CMD_FLAG_FUA)
assert b.pread(4096, 4096) == bytes(4096)
a.trim(4096, 8192)
b.cache(65536, 0)
assert a.pread(512, 8192, nbd.CMD_FLAG_DF) == bytes(512)

# In pieces, and in one.
chunks = []
a.pwrite(os.urandom(1 << 20), 0)
whole = a.pread_structured(1 << 20, 0, lambda part, offset, status, error: chunks.append((offset, bytes(part))) or 0)
assert b"".join(part for _, part in sorted(chunks)) == whole
chunks.clear()
a.pread_structured(1 << 20, 0, lambda part, offset, status, error: chunks.append(offset) or 0, nbd.CMD_FLAG_DF)
assert chunks == [0], chunks

refused(errno.EINVAL, lambda: a.pread(512, size - 256))
refused(errno.EINVAL, lambda: a.pread(512, size))
refused(errno.ENOSPC, lambda: a.pwrite(bytes(512), size - 256))
refused(errno.ENOSPC, lambda: a.zero(512, size))
assert a.pread(256, size - 256) is not None

found = []
a.block_status(size, 0, lambda context, offset, entries, error: found.extend(entries) or 0)
assert sum(found[::2]) <= size and found

# Many at once, in any order.
import itertools
done = []
for i in range(64):
    buffer = nbd.Buffer(4096)
    a.aio_pread(buffer, i * 4096, lambda error, i=i: done.append(i) or 1)
while len(done) < 64:
    a.poll(-1)
assert sorted(done) == list(range(64))
a.shutdown(); b.shutdown()
PYTHON
    stop
done
echo "-- libnbd's socket activation"
truncate -s 1M activated
[ "$(nbdinfo --size -- [ "$godwit" volume serve activated ])" = 1048576 ]
echo "interop-nbd: all passed"
