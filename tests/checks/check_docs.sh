#!/bin/sh
# check_docs.sh - README.md and the pages of docs/: docs/api.md is what the header's comments say, every block of code
# compiles, links and anchors lead somewhere, figures are those of their files under bench/results/.
#
# A block of code says its language: c, cpp, cmake, sh, text; others, and none, are mistakes. C and C++ are compiled
# with all warnings. A block that defines main is a program: it is linked with the simulated device, runs, and returns
# 0. Others are fragments: lines for the preprocessor, and bodies that begin at the margin with static, class, struct or
# SIM_KERNEL, up to their closing brace at the margin, stand at file scope, there also for later fragments of the page;
# the rest stands in a function with the parameters below.
# Environment: CC, CXX, CUDA_HOME, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} cxx=${CXX:-g++}
work=${BUILD:-build}/check_docs
include=tests/sim/include
pages="README.md CHANGELOG.md $(ls docs/*.md examples/*/README.md)"

. tests/support/verdicts.sh
said=

# ---- the page of functions ------------------------------------------------------------------------------------------

docs/api.sh >"$work/api.md" 2>"$work/out" && diff docs/api.md "$work/api.md" >>"$work/out"
verdict $? "docs/api.md is not what docs/api.sh writes (make docs-api):" "$work/out"

# ---- code -----------------------------------------------------------------------------------------------------------

# Each block of C, C++ and CMake as a file, named by page and line, which #line keeps.
# shellcheck disable=SC2086 # words
awk -v folder="$work" '
    FNR == 1 { if (file) complain("no end of the block"); file = "" }
    function complain(what) { print FILENAME ":" FNR ": " what >(folder "/fences") }
    /^ *```/ && file { close(file); file = ""; next }
    /^ *```/ {
        language = $0
        sub(/^ *```/, "", language)
        if (language !~ /^(c|cpp|cmake|python|sh|text)$/) complain("language of code: \"" language "\"")
        name = FILENAME
        gsub(/[\/.]/, "_", name)
        file = "/dev/null"
        if (language ~ /^c/) {
            file = folder "/" name "_" FNR "." language
            print file, FILENAME, FNR >(folder "/blocks")
        }
        if (language ~ /^(c|cpp)$/) printf "#line %d \"%s\"\n", FNR + 1, FILENAME >file
        next
    }
    file { print >file; next }
    # Code of C that an indent hides from all this.
    /^    .*galloc_[a-z_]+\(.*;/ && blank { complain("C in an indented block") }
    { blank = /^ *$/ || (blank && /^    /) }' $pages
touch "$work/fences"
empty "blocks of code" "$work/fences"
[ "$(grep -c '\.c ' "$work/blocks")" -ge 12 ]
verdict $? "hardly a block of C in the pages"

# A fragment as a file: what stands at file scope, of earlier ones too, then the function.
fragment() { # file, that of the earlier ones
    printf '#include %s\n' '"galloc.h"' '<stdio.h>' '<stdlib.h>' '<string.h>'
    [ ! -e "$2" ] || cat "$2"
    awk -v scope="$(grep -q GALLOC_IMPLEMENTATION "$1" && echo /dev/null || echo "$2")" '
        /^#line/ { line = $2; page = $3; next }
        {
            begins = /^#/ || /^(static|class|struct|SIM_KERNEL).*[^;]$/
            ends = /^#.*[^\\]$/ || /^}/ || (begins && /^[^#].*}$/)
            if (begins) outside = 1
            text = sprintf("#line %d %s\n%s\n", line++, page, $0)
            if (outside) { printf "%s", text; printf "%s", text >>scope }
            else rest = rest text
            if (ends) outside = 0
        }
        END {
            print "int fragment(void *p, void *q, const float *by, size_t bytes, int n, dim3 grid, dim3 block,"
            print "    cudaStream_t stream, cudaStream_t s, cudaStream_t t, galloc_pool *pool);"
            print "int fragment(void *p, void *q, const float *by, size_t bytes, int n, dim3 grid, dim3 block,"
            print "    cudaStream_t stream, cudaStream_t s, cudaStream_t t, galloc_pool *pool)"
            printf "{\n{\n%s}\nreturn 0;\n}\n", rest
        }' "$1"
}

sim=$(tests/support/device.sh "$work/sim") || exit 1
while read -r file page line; do
    case $file in
    *.c) compiler="$cc -std=c11" ;;
    *.cpp) compiler="$cxx -std=c++14" ;;
    *) continue ;;
    esac
    command -v "${compiler%% *}" >/dev/null 2>&1 || {
        echo "skipped: $page:$line: ${compiler%% *} is not found"
        continue
    }
    if grep -q '^int main(' "$file"; then
        $compiler -Wall -Wextra -Werror -I. -Iexamples/cpp -isystem $include "$file" "$sim"/*.o -o "$work/program" \
            -lpthread -lm >"$work/out" 2>&1 && "$work/program" >"$work/out" 2>&1
        verdict $? "$page:$line: this program does not compile, link and run:" "$work/out"
    else
        fragment "$file" "$work/scope.$(basename "$page").${file##*.}" >"$work/fragment.${file##*.}"
        $compiler -Wall -Wextra -Werror -Wno-unused -fsyntax-only -I. -isystem $include "$work/fragment.${file##*.}" \
            >"$work/out" 2>&1
        verdict $? "$page:$line: this does not compile:" "$work/out"
    fi
done <"$work/blocks"

# The report in the questions is one that the program prints: each of its lines, in this order.
awk '/^```/ { inside = 0 } inside; /^```text$/ { inside = 1 }' docs/faq.md |
    sed -n '/^out of memory: /,$p' >"$work/example"
settings=$(sed -n 's/.*`GALLOC_CONF=\(memory_limit:1G,[^`]*\)`.*/\1/p' docs/faq.md)
"$cc" -std=c11 -Wall -Wextra -Werror -I. -isystem $include tests/checks/faq.c "$sim"/*.o -o "$work/faq" -lpthread -lm \
    >"$work/out" 2>&1 && SIM_PACE=still GALLOC_CONF=$settings "$work/faq" >"$work/report" 2>"$work/out"
verdict $? "tests/checks/faq.c does not compile, link and run:" "$work/out"
awk 'NR == FNR { printed[NR] = $0; next }
    { while (++at in printed && printed[at] != $0); if (!(at in printed)) { print "not printed here: " $0; exit } }' \
    "$work/report" "$work/example" >"$work/out"
[ ! -s "$work/out" ] && [ "$(wc -l <"$work/example")" -ge 15 ]
verdict $? "the report in docs/faq.md is not what tests/checks/faq.c prints:" "$work/out"

# The lines for CMake build README's program, where CMake and a toolkit are found.
cuda=${CUDA_HOME:-/usr/local/cuda}
grep '\.cmake ' "$work/blocks" | while read -r file page line; do echo "$file"; done >"$work/cmake.files"
[ -s "$work/cmake.files" ]
verdict $? "no page has lines for CMake"
if ! command -v cmake >/dev/null 2>&1 || [ ! -e "$cuda/include/cuda_runtime_api.h" ]; then
    echo "skipped: the lines for CMake: cmake or a CUDA Toolkit is not found"
else
    while read -r file; do
        tree=$work/cmake
        rm -rf "$tree" && mkdir -p "$tree/third_party/galloc"
        cp "$file" "$tree/CMakeLists.txt"
        cp galloc.h "$tree/third_party/galloc"
        printf '#define GALLOC_IMPLEMENTATION\n#include "galloc.h"\n' >"$tree/third_party/galloc/galloc.c"
        awk '/^```c$/ { inside = 1; next } /^```/ && inside { exit } inside && !/GALLOC_IMPL/' README.md \
            >"$tree/my_program.c"
        { cmake -S "$tree" -B "$tree/build" -DCUDAToolkit_ROOT="$cuda" -DCMAKE_C_COMPILER="$cc" &&
            cmake --build "$tree/build" && [ -x "$tree/build/my_program" ]; } >"$work/out" 2>&1
        verdict $? "the lines for CMake build no program:" "$work/out"
    done <"$work/cmake.files"
fi

# ---- links ----------------------------------------------------------------------------------------------------------

# Anchors as GitHub makes them: lower case, blanks become dashes, punctuation goes; the second of a name has -1.
for page in $pages; do
    awk -v page="$page" '
        /^ *```/ { inside = !inside; next }
        !inside && /^#+ / {
            sub(/^#+ +/, "")
            gsub(/\]\([^)]*\)/, "")
            $0 = tolower($0)
            gsub(/[^a-z0-9 _-]/, "")
            gsub(/ /, "-")
            print page "#" $0 (seen[$0]++ ? "-" seen[$0] - 1 : "")
        }' "$page"
done >"$work/anchors"

# Links in the text, those that the text names and the end of the page has, and names that the end lacks.
for page in $pages; do
    awk -v page="$page" '
        /^ *```/ { inside = !inside; next }
        inside || /^    / { next }
        match($0, /^\[[^]]+\]: /) {
            print page, substr($0, RSTART + RLENGTH)
            explained[substr($0, 2, RLENGTH - 4)] = 1
            next
        }
        {
            gsub(/`[^`]*`/, "x")
            text = $0
            while (match(text, /\[[a-z]+\]([^(:]|$)/)) {
                used[substr(text, RSTART + 1, index(substr(text, RSTART), "]") - 2)] = 1
                text = substr(text, RSTART + RLENGTH)
            }
            while (match($0, /\]\([^) ]+\)/)) {
                print page, substr($0, RSTART + 2, RLENGTH - 3)
                $0 = substr($0, RSTART + RLENGTH)
            }
        }
        END { for (name in used) if (!(name in explained)) print page, "[" name "]" }' "$page"
done >"$work/links.all"
[ "$(wc -l <"$work/links.all")" -ge 100 ]
verdict $? "hardly a link in the pages"
while read -r page link; do
    case $link in
    *://*) continue ;;
    '#'*) file=$page ;;
    *) file=$(dirname "$page")/${link%%#*} ;;
    esac
    file=${file#./}
    case $file in *../*) file=$(realpath -m --relative-to=. "$file") ;; esac
    [ -e "$file" ] || echo "$page: $link"
    case $link in
    *#*) grep -qxF "$file#${link#*#}" "$work/anchors" || echo "$page: $link: no such heading" ;;
    esac
done <"$work/links.all" >"$work/links"
empty "links that lead nowhere" "$work/links"

# Files that are named as code.
# shellcheck disable=SC2086 # words
grep -oE '`(docs|tests|bench|examples)/[A-Za-z0-9_./-]+`' $pages | tr -d '`' | while IFS=: read -r page file; do
    [ -e "$file" ] || echo "$page: $file"
done >"$work/files"
empty "files that are not there" "$work/files"

# Each page is found from the map of the pages.
for page in docs/*.md; do
    [ "$page" = docs/index.md ] || grep -qxF "docs/index.md $(basename "$page")" "$work/links.all" || echo "$page"
done >"$work/unmapped"
empty "pages that docs/index.md does not name" "$work/unmapped"

# Each page is in a list of the site.
tr -s ' ' '\n' <docs/site.sh >"$work/words"
for page in docs/*.md; do
    grep -qxF "$page" "$work/words" || echo "$page"
done >"$work/unlisted"
empty "pages that docs/site.sh puts into no list" "$work/unlisted"

# ---- names ----------------------------------------------------------------------------------------------------------

# What pages and examples call galloc::NAME is in galloc.hpp, but for CMake's galloc::galloc.
# shellcheck disable=SC2086 # words
grep -oE 'galloc::[a-zA-Z_]+' $pages examples/*.cpp examples/*/*.py examples/*/*.c |
    while IFS=: read -r file _ _ name; do
        [ "$name" = galloc ] ||
            grep -qE "(class|struct|using) $name\>|^inline .*\<$name\(|> $name\(" examples/cpp/galloc.hpp ||
            echo "$file: $name"
    done >"$work/names"
empty "names of C++ that galloc.hpp does not have" "$work/names"

# The table of docs/design.md has each member of gai_variant, and no other.
sed -n '/^typedef struct gai_variant {/,/^}/p' galloc.h |
    sed -nE 's/^    [^/(]*\(\*([a-z_]+)\)\(.*/\1/p; s/^    [a-z][^(;]*[ *]([a-z_]+);.*/\1/p' | sort >"$work/members"
sed -n '/^### Variants/,/^##* Locks/p' docs/design.md | grep '^| `' | cut -d'|' -f2 | grep -oE '[a-z_]+' | sort |
    diff "$work/members" - >"$work/out"
empty "members of gai_variant (<) and of its table in docs/design.md (>)" "$work/out"
[ "$(wc -l <"$work/members")" -ge 30 ]
verdict $? "hardly a member of gai_variant is found"

# ---- messages -------------------------------------------------------------------------------------------------------

# Messages in the table of errors are those of the header: each of their parts between "...", numbers and N.
tr '\n' ' ' <galloc.h | sed 's/"  *"//g' >"$work/header"
awk '/^#/ { inside = /What does this error mean/ } inside && /^\| `/' docs/faq.md | cut -d'|' -f2 |
    grep -oE '`[^`]+`' | tr -d '`' >"$work/messages"
sed -E 's/\.\.\.|\<N\>|[0-9]+/\n/g' "$work/messages" | sed 's/^ *//; s/ *$//' | grep . | while read -r part; do
    grep -qF -- "$part" "$work/header" || echo "$part"
done >"$work/out"
empty "messages of docs/faq.md that galloc.h does not have" "$work/out"
[ "$(wc -l <"$work/messages")" -ge 9 ]
verdict $? "hardly a message in docs/faq.md"

# ---- figures --------------------------------------------------------------------------------------------------------

tests/support/figures.sh >"$work/out" 2>&1
verdict $? "figures:" "$work/out"

# The table of results names the commits that the files name.
sed -nE 's/^\| `([a-z0-9.-]+)`.*\| ([0-9a-f]{7,}) \|$/\1 \2/p' bench/results/README.md | while read -r file commit; do
    said=$(grep -m 1 -oE 'commit [0-9a-f]{7,}' "bench/results/$file" 2>&1 | cut -c8-14)
    [ "${said:-$commit}" = "$commit" ] || echo "bench/results/README.md: $file: $commit, but the file says $said"
done >"$work/commits"
empty "commits of results" "$work/commits"

count_verdicts
