#!/bin/sh
# check_names.sh - what galloc.h shows to the including file and to the linker, and whether it keeps its rules of form.
# Environment: CC, BUILD (a folder to work in), NM.

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} nm=${NM:-nm}
work=${BUILD:-build}/check_names
header=galloc.h

if ! command -v "$nm" >/dev/null 2>&1; then
    echo "$nm is not found. On Debian: apt install binutils"
    echo "0 passed, 1 failed"
    exit 1
fi
. tests/support/verdicts.sh
flags="-std=c11 -I. -Itests/sim/include"

same() { # what is wrong, file, file
    [ -s "$2" ] && diff "$2" "$3" >"$work/diff"
    verdict $? "$1:" "$work/diff"
}

# ---- names ----------------------------------------------------------------------------------------------------------

printf '#define GALLOC_IMPLEMENTATION\n#include "galloc.h"\n' >"$work/public.c"
printf '#define GALLOC_STATIC\n#define GALLOC_IMPLEMENTATION\n#include "galloc.h"\n' >"$work/static.c"
for kind in public static; do
    "$cc" $flags -c "$work/$kind.c" -o "$work/$kind.o" || exit 1
    "$nm" -g --defined-only "$work/$kind.o" | awk '{ print $NF }' >"$work/$kind.names"
done
[ -s "$work/public.names" ] || echo "no names at all" >"$work/none"
empty "exported names" "$work/none"
grep -v '^galloc_' "$work/public.names" >"$work/foreign"
empty "exported names that do not begin with galloc_" "$work/foreign"
empty "GALLOC_STATIC exports names" "$work/static.names"
"$nm" -u "$work/public.o" | awk '{ print $NF }' | grep '^cu[A-Z]' >"$work/driver"
empty "names that need -lcuda" "$work/driver"

# Tables that are filled at run time take no place in the program's file.
size "$work/public.o" >"$work/size"
awk 'NR == 2 && $2 < 4096 { small = 1 } END { if (!small) print ".data is 4 KiB or more, or not known:", $0 }' \
    "$work/size" >"$work/data"
empty "initialised data" "$work/data"

# What can change while the program runs, outside of pools, is in a few structs.
"$nm" -f sysv "$work/public.o" | sed -n 's/^\([^ |]*\) *|.*|\.t\{0,1\}\(data\|bss\) *$/\1/p' >"$work/variables"
printf 'gai_%s\n' process locks thread tcache cu | sort >"$work/variables.allowed"
sort "$work/variables" >"$work/variables.sorted"
same "variables that are not in gai_process or its like" "$work/variables.allowed" "$work/variables.sorted"

# What galloc is linked with neither waits for the device nor does what the driver's functions do: those it fetches.
echo 'cudaGetDevice cudaGetDriverEntryPoint cudaGetDriverEntryPointByVersion cudaGetErrorString cudaGetLastError
cudaPeekAtLastError cudaSetDevice' | tr ' ' '\n' >"$work/runtime.allowed"
"$nm" -u "$work/public.o" | awk '{ print $NF }' | grep '^cuda' | grep -vxFf "$work/runtime.allowed" >"$work/runtime"
empty "functions of the runtime that galloc should not need" "$work/runtime"

# Each declared function has its definition, and the other way round but for the per-thread variants.
sed -n 's/^GALLOC_API .*[ *]\(galloc_[a-z_]*\)(.*/\1/p' $header |
    grep -v '_ptsz$' | sort -u >"$work/declared"
grep -v '_ptsz$' "$work/public.names" | sort -u >"$work/defined"
same "declared and defined functions differ" "$work/declared" "$work/defined"

# Macros: the header's own files defined beforehand, what including it adds is its own.
sed -n 's/^ *#include \(<[a-z_/.]*>\).*/\1/p' $header | sort -u | while read -r name; do
    if printf '#include %s\n' "$name" | "$cc" $flags -E - >/dev/null 2>&1; then echo "#include $name"; fi
done >"$work/before.h"
"$cc" $flags -dM -E -x c "$work/before.h" | awk '{ sub(/\(.*/, "", $2); print $2 }' | sort -u >"$work/macros.before"
"$cc" $flags -dM -E -x c "$work/public.c" | awk '{ sub(/\(.*/, "", $2); print $2 }' | sort -u >"$work/macros.after"
comm -13 "$work/macros.before" "$work/macros.after" | grep -vE "^(GAI_|GALLOC_|galloc_)" >"$work/macros.foreign"
empty "macros without the prefix" "$work/macros.foreign"

# Each driver call is counted under its own name.
grep -oE 'X\([a-z_]+, "cu[A-Za-z0-9]+"\)' $header | sed 's/X(\(.*\), "cu\(.*\)")/\1 \2/' | sort >"$work/counters"
grep -oE 'GAI_CALL\([^,]+, [a-z_]+, [A-Z][A-Za-z0-9]*' $header | sed 's/.*, \(.*\), /\1 /' | sort -u >"$work/counted"
same "counters of driver calls and the functions called" "$work/counters" "$work/counted"

# Identifiers that the compiler would reserve: none begins with an underscore of ours.
grep -nE '(^|[^A-Za-z0-9_"])_[a-z][a-z0-9_]*gai|_{2,}(gai|galloc)' $header >"$work/reserved"
empty "reserved names" "$work/reserved"

# Tests use private parts only through tests/support/inside.h. Except checks/instructions.c, which has galloc compiled
# as programs have it: with the calls in inside.c, the compiler would inline less.
tests='tests/unit/*.[ch] tests/stress/*.[ch] tests/fuzz/*.[ch] tests/support/*.[ch]'
ls $tests | grep -v '/inside\.[ch]$' |
    xargs grep -nE '\b(gai_|GAI_)|GALLOC_IMPLEMENTATION' >"$work/private"
empty "private names of galloc.h in tests, which tests/support/inside.h should have functions for" "$work/private"

# Adaptors and examples use the public interface alone.
grep -rnE '\b(gai_|GAI_)' examples --include='*.c' --include='*.h' --include='*.cu' --include='*.cpp' \
    --include='*.hpp' >"$work/private"
empty "private names of galloc.h in examples/" "$work/private"

# Pages and tests name only what galloc.h has.
grep -ohE '\b(gai_[a-z0-9_]*[a-z0-9]|GAI_[A-Z0-9_]*[A-Z0-9])\b' docs/*.md tests/*.md tests/*/*.md tests/support/*.[ch] |
    sort -u >"$work/named"
grep -oE '\b(gai_[a-z0-9_]+|GAI_[A-Z0-9_]+)\b' $header | sort -u >"$work/has"
comm -23 "$work/named" "$work/has" >"$work/gone"
empty "names that galloc.h does not have" "$work/gone"

# ---- contents -------------------------------------------------------------------------------------------------------

awk '/SECTIONS/ { list = 1 } list; list && /\*\// { exit }' $header | grep -o '>>[a-z_]*' >"$work/tags.listed"
grep -o '^/\* >>[a-z_]*' $header | cut -c4- >"$work/tags.found"
same "the SECTIONS list and the tags differ" "$work/tags.listed" "$work/tags.found"

# The manual, which is the comment at the top, is for users and short enough to read; maintainers have docs/design.md.
awk '/\*\// { if (FNR > 250) print FNR, "lines"; exit }' $header >"$work/manual"
empty "the manual has more than 250 lines" "$work/manual"

# Options: each macro of the OPTIONS part occurs in a condition of the preprocessor.
awk '/^ *OPTIONS/ { list = 1; next } list && /^ *[A-Z][A-Z ]+[A-Z]$/ { exit } list' $header |
    grep -oE '\bGALLOC_[A-Z_]+' | sort -u >"$work/options"
[ -s "$work/options" ] || echo "no options found" >"$work/options.none"
empty "the manual has no OPTIONS" "$work/options.none"
grep -E '^ *# *(if|ifdef|ifndef|elif)\b' $header | grep -oE '\bGALLOC_[A-Z_]+' | sort -u >"$work/conditions"
comm -23 "$work/options" "$work/conditions" >"$work/options.dead"
empty "options that no #if looks at" "$work/options.dead"

# ---- version --------------------------------------------------------------------------------------------------------

number() { sed -n "s/^#define GALLOC_VERSION_$1 \([0-9]*\)$/\1/p" $header; }
version=$(number MAJOR).$(number MINOR).$(number PATCH)
grep -q "^#define GALLOC_VERSION_STRING \"$version\"$" $header || echo "$version" >"$work/version"
grep -q "^## .*$version" CHANGELOG.md || echo "CHANGELOG.md has no heading for $version" >>"$work/version"
sed -n 1,3p $header | grep -q "$version" || echo "the first lines do not say $version" >>"$work/version"
empty "version" "$work/version"

# ---- form -----------------------------------------------------------------------------------------------------------

awk 'length($0) > 120 { print FILENAME ":" FNR ": " length($0) " columns" }' $header $tests tests/compile/* \
    tests/*.sh tests/*/*.sh tests/checks/*.c >"$work/long"
empty "lines over 120 columns" "$work/long"
grep -nE '[[:blank:]]$' $header $tests tests/*.sh tests/*/*.sh tests/checks/*.c >"$work/blank"
empty "blanks at the end of lines" "$work/blank"

# Comments name the locks that a function's caller holds in one way.
{
    sed '1,/==== IMPLEMENTATION/d' $header | tr -s '\n ' '  ' >"$work/line"
    held='[^a-z](locks?|latch|latches|paging|recording)\b.?'
    grep -oE "[Cc]allers? (holds?|has) [^.;:]{0,40}$held|(With|Called with(out)?) [^.;:]{0,40}$held( held|[.,;])" \
        "$work/line"
    grep -oE ".{40}$held held[.,;]" "$work/line" | grep -vE '(no lock|at most .*) held'
    grep -noE '\[[a-z, ]*(lock|paging|latch|latches)[a-z, ]*\]' $header | grep -vE \
        ':\[(lock|paging|paging, lock|lock, latches|latch|global lock|budget lock|context lock|no lock)\]$'
} >"$work/locks"
empty "locks that callers hold, not named in brackets" "$work/locks"
grep -n "$(printf '\t')" $header $tests tests/checks/*.c >"$work/tabs"
empty "tabs" "$work/tabs"
grep -nE '^static [^={]*\);$' $header >"$work/forward"
empty "forward declarations" "$work/forward"
grep -nE '^#if 0' $header >"$work/dead"
empty "dead code" "$work/dead"

# Length of each function, from its first line to its closing brace: 80 at most, half of them under 12.
awk '/^[A-Za-z]/ && !start { start = FNR; name = $0 }
     /^[A-Za-z].*\) \{.*\}$/ { print 1, FNR, $0; start = 0; next }
     /^\{/ && start { inside = 1 }
     /^\}/ { if (inside) print FNR - start + 1, start, name; inside = start = 0; next }
     /;$/ && !inside { start = 0 }
     /^$/ && !inside { start = 0 }' $header >"$work/functions"
awk '$1 > 80' "$work/functions" >"$work/functions.long"
empty "functions over 80 lines" "$work/functions.long"
awk '{ n++ } $1 < 12 { short++ } END { if (2 * short < n || n == 0) print short + 0, "of", n, "under 12 lines" }' \
    "$work/functions" >"$work/functions.short"
empty "less than half of the functions are short" "$work/functions.short"

count_verdicts
