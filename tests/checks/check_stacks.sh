#!/bin/sh
# check_stacks.sh - the stacks of history_stacks in programs that are compiled and linked in several ways: the functions
# in a snapshot, the lines that bench/galloc-lines.sh finds, and code that was unloaded meanwhile. Without addr2line the
# lines are left out.
# Environment: CC, BUILD (a folder to work in), ADDR2LINE, GRID (set: one way more).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} addr2line=${ADDR2LINE:-addr2line}
work=${BUILD:-build}/check_stacks

. tests/support/verdicts.sh
sim=$(tests/support/device.sh "$work/sim") || exit 1
include='-I. -isystem tests/sim/include'

# What the first frames are, of each event that has some: "action function line".
firsts() { # snapshot
    awk 'BEGIN { RS = "{" }
        /^"action":/ { split($0, part, "\""); action = part[4] }
        /^"filename":/ && action { split($0, part, "\""); line = part[7]; gsub(/[:,]/, "", line)
            print action, part[10], line; action = "" }
        /^"address":/ { action = "block" }' "$1"
}

cat >"$work/library.c" <<'END'
void *through_library(void *(*back)(void *), void *pool)
{
    void *ptr = back(pool);
    __asm__ volatile("");
    return ptr;
}
END
"$cc" -g -O1 -shared -fPIC "$work/library.c" -o "$work/library.so" || exit 1
printf '#define GALLOC_IMPLEMENTATION\n#include "galloc.h"\n' >"$work/galloc.c"

program() { # name, flags of galloc, flags of both and of the linker, sources beside stacks.c
    dir=$work/$1
    mkdir -p "$dir"
    holds "$1: compiles" "$cc" -std=gnu11 -Wall -Wextra $include $2 $3 -rdynamic tests/checks/stacks.c $4 \
        "$sim"/*.o -o "$dir/program" -lpthread -lm -ldl
    holds "$1: runs" sh -c '"$1/program" "$1" "$2" >"$1/said"' sh "$dir" "$PWD/$work/library.so"
    { printf 'block in_loop\nblock in_loop\nblock in_library\n'
        printf 'alloc in_loop\nalloc in_loop\nalloc in_loop\nalloc in_library\nfree_requested in_free\n'
    } >"$dir/functions"
    firsts "$dir/stacks.json" | cut -d ' ' -f 1-2 | sort >"$dir/found"
    holds "$1: the functions" sh -c 'sort "$1" | diff - "$2"' sh "$dir/functions" "$dir/found"
    holds "$1: the library" grep -q '"name":"through_library"' "$dir/stacks.json"
    holds "$1: the library is gone" sh -c '! grep -q through_library "$1" && grep -q in_library "$1"' sh \
        "$dir/after.json"
}

lines() { # name
    dir=$work/$1
    command -v "$addr2line" >/dev/null 2>&1 || return
    holds "$1: galloc-lines.sh" sh -c 'bench/galloc-lines.sh "$1/stacks.json" >"$1/lines.json"' sh "$dir"
    firsts "$dir/lines.json" | cut -d ' ' -f 2-3 | sort -u >"$dir/found"
    holds "$1: the lines" sh -c 'sort -u "$1" | diff - "$2"' sh "$dir/said" "$dir/found"
    holds "$1: the file" grep -q '/stacks\.c","line"' "$dir/lines.json"
}

command -v "$addr2line" >/dev/null 2>&1 ||
    echo "skipped: lines: $addr2line is not found. On Debian: apt install binutils"
# galloc with nothing inlined, as programs compile it, and as a part of the program; the rest depends on the program and
# the linker alone.
object() { # name, flags
    "$cc" -std=gnu11 -Wall -Wextra $include $2 -c "$work/galloc.c" -o "$work/$1.o" || exit 1
}
object plain "-g -O0"
object optimised "-g -O2"
program apart_O0 "" "-g -O0" "$work/plain.o"
lines apart_O0
program apart_O2 "" "-g -O2" "$work/optimised.o"
lines apart_O2
program fixed_address "" "-g -O1 -no-pie -fno-pie" "$work/plain.o"
lines fixed_address
[ -z "$GRID" ] || program whole "-DWHOLE" "-O3" ""
program static "-DWHOLE -DGALLOC_STATIC" "-O3" ""

# Linked statically: nothing names functions, but each frame is a place of the program.
mkdir -p "$work/whole"
if "$cc" -std=gnu11 -static -g -O1 -w -DWHOLE $include tests/checks/stacks.c "$sim"/*.o -o "$work/whole/program" \
    -lpthread -lm >"$work/out" 2>&1; then
    holds "linked statically: runs" sh -c '"$1/program" "$1" >"$1/said"' sh "$work/whole"
    grep -oE '"line":[0-9]+' "$work/whole/stacks.json" | sort -u | cut -d : -f 2 >"$work/whole/places"
    [ "$(wc -l <"$work/whole/places")" -ge 4 ]
    verdict $? "linked statically: several frames" "$work/whole/places"
    ! command -v "$addr2line" >/dev/null 2>&1 ||
        holds "linked statically: the functions" sh -c 'for place in $(cat "$1/places"); do
            "$2" -f -e "$1/program" "$(printf %x "$place")"; done | grep -x in_loop' sh "$work/whole" "$addr2line"
fi

# Names of any characters, as compilers and file systems allow; JSON quotes what addr2line says.
odd=$work/'a "b" \c'
: >"$odd"
cat >"$work/addr2line" <<'END'
#!/bin/sh
[ -r "$4" ] || exit 1
while read -r offset; do
    case $offset in
    0x10) printf '%s\n' 'f("\")' '/src/"a" \b.c:12' ;;
    0x20) printf 'g\n/src/\001.c:13\n' ;;
    *) printf '??\n??:0\n' ;;
    esac
done
END
chmod +x "$work/addr2line"
frame() { printf '{"filename":"%s","line":%s,"name":"%s"}' "$@"; }
quoted=$(printf '%s\n' "$odd" | sed 's/["\\]/\\&/g')
{ frame "$quoted" 16 'old\"name' && frame "$quoted" 32 kept; } >"$work/odd.json"
{ frame '/src/\"a\" \\b.c' 12 'f(\"\\\")' && frame "$quoted" 32 kept; } >"$work/odd.expected"
ADDR2LINE=$PWD/$work/addr2line bench/galloc-lines.sh "$work/odd.json" >"$work/odd.lines"
holds "galloc-lines.sh quotes names" cmp "$work/odd.lines" "$work/odd.expected"

# Files that are not here, as in another folder than the program's, are named once each; the frames stay as they are.
frame ./gone 16 a ./gone 32 b '/no \"lib\".so' 48 c '??' 64 d "$quoted" 32 kept >"$work/gone.json"
printf 'galloc-lines.sh: %s cannot be read here: its frames stay as they are\n' ./gone '/no "lib".so' |
    sort >"$work/gone.expected"
ADDR2LINE=$PWD/$work/addr2line bench/galloc-lines.sh "$work/gone.json" 2>"$work/gone.said" >"$work/gone.lines"
holds "galloc-lines.sh goes on without files" cmp "$work/gone.lines" "$work/gone.json"
holds "galloc-lines.sh names files that are not here" sh -c 'sort "$1" | diff - "$2"' sh "$work/gone.said" \
    "$work/gone.expected"

bench/galloc-lines.sh "$work/nothing" >"$work/out" 2>&1
[ $? -eq 2 ] && passed=$((passed + 1)) || { failed=$((failed + 1)) && echo "FAILED galloc-lines.sh takes no file"; }

printf '\200\002}q' >"$work/snapshot.pickle"
for script in bench/galloc-lines.sh bench/galloc-trace.sh; do
    holds "$script takes no pickle" sh -c '
        "$1" "$2" >"$2.said" 2>&1
        [ $? -eq 2 ] && grep -q "no snapshot in JSON" "$2.said"' sh "$script" "$work/snapshot.pickle"
done

count_verdicts
