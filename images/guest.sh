# shellcheck shell=bash
# Boots a guest image by hand, for the checks of the images: the shortest
# working example of the QEMU command line they want (README.md has the
# reasons). Sourced after lib.sh, never run.

images=${GODWIT_IMAGES:-/var/cache/godwit-lab/images}
vcpus=1
cpu=qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt
append=''
devices=() # further words for QEMU
initrd=''
# shellcheck disable=SC2034  # an option of boot-test.sh
timeout=90
work=''
qemu=''

stop_guest() {
    if [ -n "$qemu" ]; then
        kill "$qemu" 2>/dev/null || true
        wait "$qemu" 2>/dev/null || true
        qemu=''
    fi
    [ -z "$work" ] || rm -rf "$work"
}

# Sets the variable that an option is named after.
take_option() { # --NAME VALUE
    [ $# -ge 2 ] || die "$1 needs a value: see the head of $0"
    local option=${1#--}
    printf -v "${option//-/_}" %s "$2"
}

# Starts QEMU with $devices; the console goes to $work/console, and what is
# written to file descriptor 3 is typed into it.
boot_guest() { # KERNEL INITRD MEMORY-KIB WORDS-FOR-THE-KERNEL
    mkfifo "$work/typed"
    : >"$work/console"
    exec 3<>"$work/typed"

    local words="console=ttyS0 quiet panic=-1 oops=panic"
    words+=" random.trust_cpu=on no_timer_check tsc=reliable clocksource=tsc"
    words+=" nowatchdog nosoftlockup rcupdate.rcu_cpu_stall_suppress=1 $4"

    # shellcheck disable=SC2034  # read by the callers
    start=$(date +%s%N)
    qemu-system-x86_64 \
        -accel tcg,thread=multi -machine q35 -cpu "$cpu" -smp "$vcpus" -m "${3}k" \
        -nodefaults -no-user-config -vga none -display none -no-reboot \
        -kernel "$1" -initrd "$2" -append "$words" \
        -device virtio-rng-pci "${devices[@]}" \
        -chardev stdio,id=serial0,signal=off -serial chardev:serial0 \
        <&3 >"$work/console" 2>"$work/stderr" &
    qemu=$!
}

# A folder for what a guest needs; it goes with the script, and so does the guest.
prepare_guest() {
    need_command qemu-system-x86_64 qemu-system-x86
    work=$(mktemp -d "${TMPDIR:-/var/tmp}/godwit-guest.XXXXXX")
    trap stop_guest EXIT
    trap 'exit 130' INT TERM HUP
}

# Starts $images/NAME on a sparse copy of TEMPLATE.
start_guest() { # NAME TEMPLATE DISK-SIZE MEMORY-KIB
    local directory=$images/$1
    [ -e "$directory/manifest.json" ] || die "no $1 image in $images: run scripts/setup.sh $1"
    prepare_guest
    cp --sparse=always "$directory/$2" "$work/disk.raw"
    truncate -s "$3" "$work/disk.raw"
    # First, so that they are the guest's first disk and first network.
    devices=(
        -drive "if=none,id=disk0,file=$work/disk.raw,format=raw,discard=unmap"
        -device "virtio-blk-pci,drive=disk0"
        -netdev "user,id=net0,restrict=on,ipv6=off,net=10.99.0.0/16"
        -device "virtio-net-pci,netdev=net0,mac=52:54:00:99:00:0b,romfile="
        "${devices[@]}"
    )
    boot_guest "$directory/vmlinuz" "${initrd:-$directory/initrd}" "$4" \
        "godwit.ip=10.99.0.11/16 godwit.mtu=1450 $append"
}

# Waits until a line of the console matches PATTERN (an extended regular
# expression), and prints the first such line.
await_console() { # PATTERN SECONDS
    local deadline=$(($(date +%s%N) + $2 * 1000000000))
    until tr -d '\r' <"$work/console" | grep -a -m 1 -E "$1"; do
        if ! kill -0 "$qemu" 2>/dev/null; then
            tail -n 20 "$work/console" "$work/stderr" >&2 || true
            die "QEMU ended before the guest said $1 (its last words are above)"
        fi
        if [ "$(date +%s%N)" -gt "$deadline" ]; then
            tail -n 20 "$work/console" >&2 || true
            die "the guest did not say $1 within $2 s (the console's last lines are above)"
        fi
        sleep 0.05
    done
}

seconds_since() { # NANOSECONDS
    local hundredths=$((($(date +%s%N) - $1) / 10000000))
    printf '%d.%02d' $((hundredths / 100)) $((hundredths % 100))
}
