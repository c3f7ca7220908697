#!/usr/bin/env bash
# scripts/deb.sh [--binary FILE] [--version VERSION] [--lint yes|no] OUTDIR
#
# Makes the Debian packages in OUTDIR: godwit (the program, with man pages and
# completions that it writes itself), godwit-controller and godwit-node (a unit
# and a configuration file each). Made by dpkg's own tools from what stands in
# packaging/; no network, no root. With lintian at hand, an error of its is an
# error here.
#
# The same commit and binary make the same bytes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=images/lib.sh
. "$root/images/lib.sh"

binary=${CARGO_TARGET_DIR:-$root/target}/release/godwit
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version *= *"\(.*\)"/\1/p' "$root/Cargo.toml")-1
lint=yes
while [ $# -gt 1 ]; do
    case $1 in
        --binary) binary=$2 ;;
        --version) version=$2 ;;
        --lint) lint=$2 ;;
        *) die "unknown option $1: see the head of $0" ;;
    esac
    shift 2
done
[ $# = 1 ] || die "usage: scripts/deb.sh [--binary FILE] [--version VERSION] [--lint yes|no] OUTDIR"
[ -x "$binary" ] || die "$binary is missing: make deb builds it"
need_command dpkg-deb dpkg
need_command dpkg-shlibdeps dpkg-dev
need_command strip binutils
mkdir -p "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022

SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo "$IMAGE_EPOCH")}
export SOURCE_DATE_EPOCH
arch=$(dpkg --print-architecture)
# Whoever publishes packages says who answers for them, as for Debian's own tools.
maintainer="${DEBFULLNAME:-The Godwit developers} <${DEBEMAIL:-godwit@localhost.localdomain}>"

# ---- What each package holds ---------------------------------------------------

common() { # PACKAGE: its folder, with what every package has
    local tree=$work/$1 doc=$work/$1/usr/share/doc/$1
    mkdir -p "$tree/DEBIAN" "$doc"
    cp "$root/packaging/deb/copyright" "$doc/copyright"
    {
        printf 'godwit (%s) unstable; urgency=medium\n\n  * Built from the sources; see their history.\n\n' "$version"
        printf ' -- %s  %s\n' "$maintainer" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n >"$doc/changelog.Debian.gz"
    printf '%s\n' "$tree"
}

tree=$(common godwit)
install -D -m 755 "$binary" "$tree/usr/bin/godwit"
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$tree/usr/bin/godwit"
"$binary" man --out "$tree/usr/share/man/man1"
find "$tree/usr/share/man" -name '*.1' -exec gzip -9n {} +
completion() { # SHELL FILE
    mkdir -p "$(dirname "$tree/$2")"
    "$binary" completion "$1" >"$tree/$2"
}
completion bash usr/share/bash-completion/completions/godwit
completion zsh usr/share/zsh/vendor-completions/_godwit
completion fish usr/share/fish/vendor_completions.d/godwit.fish
cp "$root/README.md" "$tree/usr/share/doc/godwit/"

for daemon in controller node; do
    tree=$(common "godwit-$daemon")
    install -D -m 644 "$root/packaging/systemd/godwit-$daemon.service" "$tree/lib/systemd/system/godwit-$daemon.service"
    install -D -m 644 "$root/packaging/etc/$daemon.toml" "$tree/etc/godwit/$daemon.toml"
    # Drop-ins of its unit, for who wants what they are for.
    [ "$daemon" = controller ] || install -D -m 644 -t "$tree/usr/share/godwit" "$root"/packaging/systemd/*.conf
    printf '/etc/godwit/%s.toml\n' "$daemon" >"$tree/DEBIAN/conffiles"
    # Open to all, so that each daemon reaches its own folder in it, which is not: whoever makes a certificate there
    # before the first start would otherwise make it closed.
    mkdir -p "$tree/var/lib/godwit"
    # shellcheck source=/dev/null
    . "$root/packaging/deb/godwit-$daemon.parts"
    for script in postinst prerm postrm; do
        text=$(<"$root/packaging/deb/$script.in")
        text=${text//@PACKAGE@/godwit-$daemon}
        # Quoted, since bash would take an & for what was found.
        text=${text//@CONFIGURE@/"$CONFIGURE"}
        text=${text//@REMOVE@/"$REMOVE"}
        text=${text//@REMOVED@/"$REMOVED"}
        text=${text//@PURGED@/"$PURGED"}
        printf '%s\n' "$text" >"$tree/DEBIAN/$script"
        chmod 755 "$tree/DEBIAN/$script"
        sh -n "$tree/DEBIAN/$script"
    done
done

# ---- What the program needs of the C library -------------------------------------

mkdir -p "$work/source/debian"
printf 'Source: godwit\n\nPackage: godwit\nArchitecture: any\n' >"$work/source/debian/control"
needs=$(cd "$work/source" && dpkg-shlibdeps -O "$work/godwit/usr/bin/godwit" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
[ -n "$needs" ] || die "dpkg-shlibdeps does not say what $binary needs: is it a program of this machine's kind?"

# ---- Packages ------------------------------------------------------------------

for package in godwit godwit-controller godwit-node; do
    tree=$work/$package
    kind=$arch
    [ "$package" = godwit ] || kind=all
    {
        printf 'Package: %s\nVersion: %s\nArchitecture: %s\n' "$package" "$version" "$kind"
        if [ "$package" = godwit ]; then printf 'Depends: %s\n' "$needs"; else printf 'Source: godwit\n'; fi
        printf 'Section: admin\nPriority: optional\nMaintainer: %s\n' "$maintainer"
        printf 'Installed-Size: %s\n' "$(du -k -s --apparent-size "$tree" | cut -f 1)"
        sed "s/@VERSION@/$version/" "$root/packaging/deb/$package.control"
    } >"$tree/DEBIAN/control"
    (cd "$tree" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) \
        >"$tree/DEBIAN/md5sums"
    find "$tree" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
    file=${package}_${version}_$kind.deb
    dpkg-deb --root-owner-group -Zxz --build "$tree" "$out/$file" >/dev/null
    say "made $out/$file ($(stat -c %s "$out/$file") bytes)"
done

if [ "$lint" = yes ] && command -v lintian >/dev/null; then
    suppressed=initial-upload-closes-no-bugs
    [ -n "${DEBEMAIL:-}" ] || suppressed+=,bogus-mail-host,bogus-mail-host-in-debian-changelog
    lintian --allow-root --fail-on error --suppress-tags "$suppressed" "$out"/godwit*_"$version"_*.deb >&2 ||
        die "lintian finds errors: they are above"
    say "lintian finds no error"
fi
