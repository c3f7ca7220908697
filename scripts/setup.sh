#!/usr/bin/env bash
# scripts/setup.sh [--quiet] [tiny|debian|deb|nbd|libnbd|wires|api|ceph|qemu10 ...]
#
# Brings this machine to where `make test` and `make demo` run: Debian packages,
# a Rust tool-chain (checked, not installed) and guest images (tiny unless named
# otherwise). Run it as often as you like: with nothing to do it asks neither
# apt nor the network and returns at once.
#
# GODWIT_IMAGES is where images live, /var/cache/godwit-lab/images unless set.
# IMAGES/tiny is a link to the build in use, so a rebuild appears in one step and
# an interrupted one not at all.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=images/lib.sh
. "$root/images/lib.sh"

wanted=()
deb=no
nbd=no
libnbd=no
wires=no
api=no
ceph=no
qemu10=no
for argument in "$@"; do
    case $argument in
        --quiet) export GODWIT_QUIET=1 ;;
        tiny | debian) wanted+=("$argument") ;;
        deb) deb=yes ;; # what makes Debian packages; no image
        nbd) nbd=yes ;; # what our NBD server is measured and tried against; no image
        libnbd) libnbd=yes ;; # libnbd's own tests, in source; no image
        qemu10) qemu10=yes ;; # a second QEMU, unpacked beside the installed one; no image
        wires) wires=yes ;; # the tunnels that wires are measured against; no image
        api) api=yes ;; # what asks the API by its document; no image
        ceph) ceph=yes ;; # the programs of a cluster of one machine; no image
        *) die "unknown argument $argument: usage: scripts/setup.sh [--quiet] [tiny|debian|deb|nbd|libnbd|wires|api|ceph|qemu10 ...]" ;;
    esac
done
case "$deb$nbd$libnbd$wires$api$ceph$qemu10" in *yes*) ;; *) [ ${#wanted[@]} -gt 0 ] || wanted=(tiny) ;; esac
images=${GODWIT_IMAGES:-/var/cache/godwit-lab/images}
images=${images%/}

# ---- Debian packages ----------------------------------------------------

packages=(
    qemu-system-x86 qemu-utils qemu-block-extra # hypervisor, disk tools, NBD
    libnbd-bin                                  # NBD clients that the server is tested with
    busybox-static cpio kmod openssl perl       # the tiny image
    zstd xz-utils e2fsprogs util-linux          # archives, file systems, flock
    ethtool iproute2 iputils-ping nftables      # the network: the lab's, and who may speak on a wire
    wireguard-tools wireguard-go                # extenders
    build-essential pkg-config                  # Rust's linker and C parts
)
case " ${wanted[*]} " in *" debian "*) packages+=(mmdebstrap systemd) ;; esac
[ "$deb" = no ] || packages+=(dpkg-dev binutils lintian)
[ "$nbd" = no ] || packages+=(fio nbdkit python3-libnbd)
[ "$libnbd" = no ] || packages+=(libnbd-dev python3-libnbd gnutls-bin dpkg-dev)
[ "$wires" = no ] || packages+=(openvpn socat)
[ "$api" = no ] || packages+=(python3-venv curl)
# Without the package `ceph`, whose units would start a cluster.
[ "$ceph" = no ] || packages+=(ceph-mon ceph-osd ceph-common)

missing_packages() {
    local installed
    # dpkg-query fails when it has never heard of one of them, as on a bare machine: that is an answer, too.
    installed=$({ dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null || true; } |
        awk '$2 == "installed" { print $1 }')
    printf '%s\n' "${packages[@]}" | grep -vxF -f <(printf '%s\n' "$installed") || true
}

install_packages() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends "$@" >&2
}

command -v dpkg-query >/dev/null ||
    die "this is not Debian or a relative (no dpkg): install ${packages[*]} by hand, then edit scripts/setup.sh"
mapfile -t missing < <(missing_packages)
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || die "apt-get is missing and so are: ${missing[*]}: install them by hand"
    [ "$(id -u)" = 0 ] || die "not root, and these packages are missing: run: sudo apt-get install ${missing[*]}"
    say "installing ${missing[*]}"
    apt_with_update install_packages "${missing[@]}" ||
        die "apt-get could not install ${missing[*]}: its message is above"
fi

# ---- Another QEMU ---------------------------------------------------------

# Debian's backports have QEMU 10. It is not installed, so that the machine keeps what its other users have; its packages are unpacked
# into a folder, which a scenario's `site.qemu` names. apt checks their signatures, in a configuration of its own.
if [ "$qemu10" = yes ]; then
    QEMU10=${GODWIT_QEMU10:-$(dirname "$images")/qemu10}
    # shellcheck source=images/qemu10.sh
    . "$root/images/qemu10.sh"
    qemu10_unpack "$QEMU10"
    say "QEMU 10 is in $QEMU10/bin"
fi

# ---- libnbd's tests -------------------------------------------------------

if [ "$libnbd" = yes ]; then
    # shellcheck source=images/libnbd.sh
    . "$root/images/libnbd.sh"
    libnbd_unpack "$(dirname "$images")/libnbd"
    say "libnbd's source is in $(dirname "$images")/libnbd"
fi

# ---- Rust -----------------------------------------------------------------

# Debian 12's own cargo is too old for the 2024 edition, hence no package.
[ -z "${HOME:-}" ] || PATH=$PATH:$HOME/.cargo/bin
rust_wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' "$root/Cargo.toml")
command -v cargo >/dev/null ||
    die "no cargo in PATH: install Rust $rust_wanted or newer (https://rustup.rs), then run this again"
rust_found=$(cargo --version 2>/dev/null | awk '{ print $2 }') || rust_found=''
[ -n "$rust_found" ] || die "cargo does not run: try 'cargo --version'; with rustup, 'rustup default stable'"
[ "$(printf '%s\n' "$rust_wanted" "$rust_found" | sort -V | head -n 1)" = "$rust_wanted" ] ||
    die "cargo is $rust_found, $rust_wanted or newer is needed: with rustup, 'rustup update stable'"
for tool in fmt clippy; do
    cargo "$tool" --version >/dev/null 2>&1 ||
        say "no cargo $tool, which make test takes and make demo does not: with rustup, 'rustup component add rustfmt clippy'"
done

# ---- Guest images -----------------------------------------------------------

build=''
cleanup() { [ -z "$build" ] || rm -rf "$build"; }
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

is_current() { # IMAGE STAMP
    [ -s "$images/$1/manifest.json" ] && grep -q "\"stamp\": \"$2\"" "$images/$1/manifest.json"
}

for image in "${wanted[@]}"; do
    stamp=$("$root/images/$image.sh" --stamp)
    is_current "$image" "$stamp" && continue
    [ "$(id -u)" = 0 ] || die "the $image image has to be built, which needs root: run: sudo scripts/setup.sh $image"
    mkdir -p "$images" || die "cannot make $images: set GODWIT_IMAGES to a directory that can be written"

    # One builder at a time; whoever waited finds the image made.
    exec 9>"$images/.lock"
    flock --nonblock 9 || { say "another set-up is building an image: waiting for it"; flock 9; }
    if ! is_current "$image" "$stamp"; then
        # Under the lock nobody else builds: what lies here was left by a kill.
        rm -rf "$images"/.build.*
        build=$(mktemp -d "$images/.build.XXXXXX")
        say "building the $image image in $images"
        SECONDS=0
        "$root/images/$image.sh" "$build" ||
            die "the $image image was not built: the message above says why; nothing was changed"
        # A name of its own for each build, and a rename of the link that
        # publishes it: a lab that has the old files open keeps them.
        name=$image.$stamp.$(date +%s)
        mv "$build/$image" "$images/$name"
        ln -s "$name" "$build/link"
        mv -T "$build/link" "$images/$image"
        find "$images" -mindepth 1 -maxdepth 1 -name "$image.*" ! -name "$name" -exec rm -rf {} +
        rm -rf "$build"
        build=''
        say "the $image image is ready after $SECONDS s"
    fi
    exec 9>&-
done
say "ready: packages, Rust $rust_found, images: ${wanted[*]:-none asked for} in $images"
