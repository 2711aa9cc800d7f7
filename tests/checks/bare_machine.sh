#!/bin/sh
# bare_machine.sh - do `make demo` and `make test` work on a machine that has nothing but what README.md names for them?
#
# As root, where debootstrap is found, such a machine is made: a Debian of the same release, from the mirror that this
# machine installs from, with the four packages and no others. It is kept for the next time, outside the tree. Elsewhere
# the programs of all other packages are hidden, which finds less. Environment: CACHE (a folder), HIDE (set: do not make
# a machine), STEPS (instead of `demo test`).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
cache=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/galloc}
root=$cache/bare
packages='gcc libc6-dev make gzip'
steps=${STEPS:-demo test}

grep -q "^| \`make demo\`, \`make test\` | \`$packages\`" README.md || {
    echo "README.md does not name these packages: $packages"
    exit 1
}

# The mirror with this release, as apt knows it, in either of its formats.
mirror() { # release
    cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | awk -v release="$1" '
        $1 == "deb" { sub(/\[[^]]*\] */, ""); if ($3 == release) print $2 }
        $1 == "Types:" { uri = "" }
        $1 == "URIs:" { uri = $2 }
        $1 == "Suites:" && uri { for (i = 2; i <= NF; i++) if ($i == release) print uri }' | head -n 1
}

# What git knows, or all but what was built.
copy() { # folder
    rm -rf "$1" && mkdir -p "$1" || return
    if git rev-parse >/dev/null 2>&1; then
        git ls-files -z --cached --others --exclude-standard | tar -c --null -T - -f - | tar -x -C "$1" -f -
    else
        tar -c --exclude=./build -f - . | tar -x -C "$1" -f -
    fi
}

make_machine() {
    [ -e "$root/made" ] && return
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    from=$(mirror "$release")
    [ -n "$from" ] || return
    echo "making a machine with $packages, once, in $root"
    mkdir -p "$root" && debootstrap --variant=minbase --include="$(echo "$packages" | tr ' ' ,)" "$release" \
        "$root/tree" "$from" >"$cache/debootstrap.log" 2>&1 && touch "$root/made" && return
    tail -n 5 "$cache/debootstrap.log"
    rm -rf --one-file-system "$root"
    return 1
}

on_machine() {
    tree=$root/tree
    copy "$tree/galloc" || return
    mount -t proc proc "$tree/proc" 2>/dev/null && trap 'umount "$tree/proc"' EXIT
    for step in $steps; do
        chroot "$tree" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root ${JOBS:+JOBS="$JOBS"} \
            /bin/sh -c "cd /galloc && make $step" || return
    done
}

# Links to the programs of the packages and of those that every Debian has.
hide() { # folder
    rm -rf "$1" && mkdir -p "$1" || return
    essential='coreutils dash sed grep mawk findutils diffutils util-linux tar bash libc-bin debianutils'
    for package in $packages $essential binutils cpp $(dpkg-query -W -f '${Package}\n' 'gcc-[0-9]*' 'cpp-[0-9]*' \
        'binutils-*-linux-gnu' 2>/dev/null); do
        dpkg -L "$package" 2>/dev/null | grep -E '^(/usr)?/s?bin/[^/]+$'
    done | while read -r program; do ln -sf "$program" "$1/"; done
    ln -sf "$(command -v mawk || command -v awk)" "$1/awk"
    [ -e "$1/gcc" ] || ! echo "dpkg does not say where gcc is"
}

with_hidden() {
    hide "$cache/hidden" && copy "$cache/copy" || return
    for step in $steps; do
        (cd "$cache/copy" && env -i PATH="$cache/hidden" HOME=/nonexistent ${JOBS:+JOBS="$JOBS"} make $step NVCC= \
            CUDA_HOME=/nonexistent) || return
    done
}

mkdir -p "$cache" || exit 1
if [ -z "$HIDE" ] && [ "$(id -u)" -eq 0 ] && command -v debootstrap >/dev/null 2>&1 && make_machine; then
    on_machine
else
    echo "no machine can be made (root and debootstrap are needed): other packages' programs are hidden"
    with_hidden
fi
