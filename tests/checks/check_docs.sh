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
passed=0 failed=0

rm -rf "$work" && mkdir -p "$work" || exit 1

verdict() { # 0 when it holds, what does, file that says more
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $2"
        [ -z "$3" ] || head -20 "$3"
    fi
}

empty() { # file, what it means that it is
    [ ! -s "$1" ]
    verdict $? "$2" "$1"
}

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
empty "$work/fences" "blocks of code:"
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
    case $file in docs/../*) file=${file#docs/../} ;; esac
    [ -e "$file" ] || echo "$page: $link"
    case $link in
    *#*) grep -qxF "$file#${link#*#}" "$work/anchors" || echo "$page: $link: no such heading" ;;
    esac
done <"$work/links.all" >"$work/links"
empty "$work/links" "links that lead nowhere:"

# Files that are named as code.
# shellcheck disable=SC2086 # words
grep -oE '`(docs|tests|bench|examples)/[A-Za-z0-9_./-]+`' $pages | tr -d '`' | while IFS=: read -r page file; do
    [ -e "$file" ] || echo "$page: $file"
done >"$work/files"
empty "$work/files" "files that are not there:"

# Each page is found from the map of the pages.
for page in docs/*.md; do
    [ "$page" = docs/index.md ] || grep -qxF "docs/index.md $(basename "$page")" "$work/links.all" || echo "$page"
done >"$work/unmapped"
empty "$work/unmapped" "pages that docs/index.md does not name:"

# ---- figures --------------------------------------------------------------------------------------------------------

tests/support/figures.sh >"$work/out" 2>&1
verdict $? "figures:" "$work/out"

# The table of results names the commits that the files name.
sed -nE 's/^\| `([a-z0-9.-]+)`.*\| ([0-9a-f]{7,}) \|$/\1 \2/p' bench/results/README.md | while read -r file commit; do
    said=$(grep -m 1 -oE 'commit [0-9a-f]{7,}' "bench/results/$file" 2>&1 | cut -c8-14)
    [ "${said:-$commit}" = "$commit" ] || echo "bench/results/README.md: $file: $commit, but the file says $said"
done >"$work/commits"
empty "$work/commits" "commits of results:"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
