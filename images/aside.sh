# shellcheck shell=bash
# apt in a configuration of its own: what it fetches is signed as everything is, and the machine's lists stay as they are. Sourced, never run.

# Makes WORK, with the package lists of Debian's SUITE.
aside_update() { # WORK deb|deb-src SUITE
    local work=$1 kind=$2 suite=$3 keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r "$keys" ] || die "$keys is missing: run: apt-get install debian-archive-keyring"
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    echo "$kind [signed-by=$keys] http://deb.debian.org/debian $suite main" >"$work/sources.list"
    aside_apt "$work" update || die "cannot read $suite's package lists: is deb.debian.org to be reached?"
}

aside_apt() { # WORK COMMAND...
    local work=$1
    shift
    apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists" \
        -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none "$@" >&2
}
