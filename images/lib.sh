# shellcheck shell=bash
# What the image builders share: messages, the guest kernel, and the small
# initrd that both guests boot from. Sourced, never run.
#
# The kernel comes out of Debian's package without installing it: the machine
# that builds an image needs no kernel of its own, and may be a container.

# A fixed date for everything in an image, so that the same inputs make the
# same bytes (2023-06-10, the day of Debian 12).
readonly IMAGE_EPOCH=1686355200

say() { [ -n "${GODWIT_QUIET:-}" ] || printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; exit 1; }

need_root() {
    [ "$(id -u)" = 0 ] || die "$1 needs root: run it with sudo"
}

need_command() { # COMMAND PACKAGE
    command -v "$1" >/dev/null || die "$1 is missing: run scripts/setup.sh, or apt-get install $2"
}

# The image builders pack files as root and write gigabytes: say so before
# starting rather than leave half of it behind.
need_space_mib() { # DIRECTORY MIB
    local free
    free=$(df --output=avail -m "$1" | tail -n 1 | tr -d ' ')
    [ "$free" -ge "$2" ] ||
        die "$1 has $free MiB free, $2 MiB are needed: free some space, or set GODWIT_IMAGES to a larger disk"
}

# A network failure mid-way is common and retried; an old package list gives
# "404 Not Found", which only an update cures.
apt_with_update() { # COMMAND...
    "$@" && return
    say "refreshing the package lists"
    apt-get -qq -o DPkg::Lock::Timeout=300 update >&2 ||
        die "apt-get update failed: check /etc/apt/sources.list and the network, then run this again"
    "$@"
}

# linux-image-cloud-amd64 is an empty package that depends on the real one.
real_kernel_package() {
    apt-cache depends linux-image-cloud-amd64 2>/dev/null |
        awk '/Depends: linux-image-[0-9]/ { print $2; found = 1; exit } END { exit !found }'
}

download_kernel() { # into the current directory
    local package
    package=$(real_kernel_package) &&
        apt-get -qq -o APT::Sandbox::User=root download "$package" >&2
}

# Leaves DIR/boot/vmlinuz-RELEASE and DIR/lib/modules/RELEASE; prints RELEASE.
unpack_kernel() { # DIR
    mkdir -p "$1"
    (cd "$1" && apt_with_update download_kernel) ||
        die "cannot download linux-image-cloud-amd64: is Debian's main archive for amd64 in /etc/apt?"
    dpkg-deb -x "$1"/linux-image-*.deb "$1"
    rm "$1"/linux-image-*.deb
    local release
    release=$(ls "$1/lib/modules")
    depmod --basedir "$1" "$release"
    printf '%s\n' "$release"
}

# Copies modules and what they depend on into TREE/lib/modules, and lists them
# in TREE/lib/modules/order, so that /init needs insmod alone. A module that is
# built into the kernel drops out here.
add_modules() { # TREE KERNEL-DIR RELEASE MODULE...
    local tree=$1 kernel=$2 release=$3 module file name
    shift 3
    mkdir -p "$tree/lib/modules"
    for module in "$@"; do
        modprobe --dirname "$kernel" --set-version "$release" --config /dev/null \
            --show-depends "$module" || die "kernel $release has no module $module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' |
        while read -r file; do
            name=${file##*/}
            name=${name%%.ko*}.ko
            case $file in
                *.xz) xz -dc "$file" >"$tree/lib/modules/$name" ;;
                *.zst) zstd -qdc "$file" >"$tree/lib/modules/$name" ;;
                *) cp "$file" "$tree/lib/modules/$name" ;;
            esac
            printf '%s\n' "$name"
        done >"$tree/lib/modules/order"
}

# What a guest may find on its PCI bus. ext4 is built into Debian's cloud
# kernel; naming it makes a kernel without it fail here and not in the guest.
# shellcheck disable=SC2034  # used by the scripts that source this file
readonly GUEST_MODULES=(virtio_pci virtio_blk virtio_net virtio-rng virtio_balloon virtio_console ext4)

add_guest_init() { # TREE INIT-SCRIPT
    [ -x /bin/busybox ] || die "/bin/busybox is missing: run scripts/setup.sh, or apt-get install busybox-static"
    mkdir -p "$1/bin" "$1/dev" "$1/proc" "$1/sys"
    cp /bin/busybox "$1/bin/busybox"
    local applet
    for applet in $(/bin/busybox --list); do
        [ "$applet" = busybox ] || ln -sf busybox "$1/bin/$applet"
    done
    ln -sf bin "$1/sbin"
    cp "$2" "$1/init"
    chmod 755 "$1/init"
}

# Uncompressed on purpose. Under emulation unpacking costs the guest more than
# QEMU's copy of three more megabytes, and the kernel looks for an appended
# archive at a multiple of four bytes, which cpio's padding to 512 guarantees.
pack_initrd() { # TREE OUTFILE
    find "$1" -exec touch --no-dereference --date="@$IMAGE_EPOCH" {} +
    (cd "$1" && find . -mindepth 1 | LC_ALL=C sort |
        cpio --quiet --create --format=newc --reproducible --owner=0:0) >"$2"
}

busybox_version() { /bin/busybox | awk 'NR == 1 { print $2 }'; }

# The stamp in a manifest names the recipe: an image is rebuilt when a file of
# the recipe changed, and not because the machine's packages moved on.
recipe_stamp() { # FILE...
    cat "$@" | sha256sum | cut -c 1-16
}
