#!/bin/sh
# check_readme.sh - what the texts say is so: the code of README.md and of the header's DO THIS compiles and runs, tests
# that are named exist, tables are those of their files. The code and the links of all pages, and figures one by one,
# are checked by check_docs.sh.
# Environment: CC, NVCC, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/check_readme
include=tests/sim/include

. tests/support/verdicts.sh
said=

# ---- code -----------------------------------------------------------------------------------------------------------

sim=$(tests/support/device.sh "$work/sim") || exit 1

# Compiles a program with all warnings, links it with the simulated device, runs it.
works() { # file, what it is
    "$cc" -std=c11 -Wall -Wextra -Werror -I. -isystem $include "$1" "$sim"/*.o -o "$work/program" -lpthread -lm \
        >"$work/out" 2>&1 && "$work/program" >"$work/out" 2>&1
    verdict $? "$2 does not compile, link and run:" "$work/out"
}

# The first block of C in the README.
awk '/^```c$/ { inside = 1; next } /^```/ && inside { exit } inside' README.md >"$work/readme.c"
works "$work/readme.c" "the code in README.md"
[ "$(grep -n '^```c$' README.md | head -n 1 | cut -d: -f1)" -le 15 ] && [ -s "$work/readme.c" ]
verdict $? "README.md has no code by line 15"
[ "$(wc -l <README.md)" -le 200 ]
verdict $? "README.md is longer than 200 lines"

# The lines of DO THIS in the header: those for the preprocessor (what stands beside them is for other files), then
# statements, of which a kernel launch is the only one that is not C.
awk '/^   DO THIS/ { inside = 1; next } inside && /^   [A-Z][A-Z ]+$/ { exit } inside && /^       /' galloc.h \
    >"$work/do_this"
grep '^ *#' "$work/do_this" | sed 's/^ *//; s/   .*//' >"$work/preamble"
grep -v '^ *#' "$work/do_this" >"$work/statements"
grep -q GALLOC_IMPLEMENTATION "$work/preamble" && grep -q galloc_malloc "$work/statements" &&
    grep -q galloc_free "$work/statements"
verdict $? "the header's DO THIS shows no allocation"

program() { # how my_kernel is defined
    cat "$work/preamble"
    printf '%s\n' "$1"
    echo 'int main(void) {'
    echo '    size_t bytes = 4096;'
    echo '    cudaStream_t stream;'
    echo '    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 1;'
    cat "$work/statements"
    echo '    return galloc_shutdown() != cudaSuccess;'
    echo '}'
}

program 'static void my_kernel(float *p, cudaStream_t s) { (void)cudaMemsetAsync(p, 0, 4096, s); }' |
    sed 's/<<<.*>>>(p)/(p, stream)/' >"$work/do_this.c"
works "$work/do_this.c" "the header's DO THIS"
if [ -n "$NVCC" ] && [ -x "$NVCC" ]; then
    program '__global__ void my_kernel(float *p) { *p = 0; }
static const int grid = 1, block = 1;' >"$work/do_this.cu"
    "$NVCC" -I. -c "$work/do_this.cu" -o "$work/do_this.o" >"$work/out" 2>&1
    verdict $? "the header's DO THIS does not compile as CUDA C++:" "$work/out"
fi

# ---- what the texts name --------------------------------------------------------------------------------------------

texts="README.md CHANGELOG.md $(ls docs/*.md tests/*.md tests/*/*.md)"

# Figures: each row of the README's table names its file.
awk '/figures:begin/ { inside = 1 } /figures:end/ { exit } inside && /^\|[^-]/ { print }' README.md | tail -n +2 |
    grep -E '[0-9]' | grep -vE 'bench/results/[A-Za-z0-9._-]+' >"$work/figures"
empty "figures without a file" "$work/figures"

# The table of overheads is what its file says.
awk '/overhead:begin/ { inside = 1; next } /overhead:end/ { exit } inside && /^\|/' docs/experiments.md \
    >"$work/overhead"
bench/overhead.sh --table | diff "$work/overhead" - >"$work/out" && [ -s "$work/overhead" ]
verdict $? "the table of overheads in docs/experiments.md is not that of its file:" "$work/out"

# So is that of the adversaries.
awk '/adversaries:begin/ { inside = 1; next } /adversaries:end/ { exit } inside && /^\|/' docs/experiments.md \
    >"$work/adversaries"
bench/adversaries.sh --table | diff "$work/adversaries" - >"$work/out" && [ -s "$work/adversaries" ]
verdict $? "the table of adversaries in docs/experiments.md is not that of its file:" "$work/out"

# So is that of strategy:heuristic.
awk '/grid:begin/ { inside = 1; next } /grid:end/ { exit } inside && /^\|/' docs/experiments.md >"$work/grid"
bench/grid.sh --table | diff "$work/grid" - >"$work/out" && [ -s "$work/grid" ]
verdict $? "the table of the grid in docs/experiments.md is not that of its file:" "$work/out"

# And those of the tuning page, which leave columns out: moves in the first, collections in the second.
bench/tuning.sh --table | awk -F ' *\\| *' '{ print $2 "|" $3 "|" $4 "|" $5 "|" ($2 ~ /^limit/ ? $9 : $7) }' \
    >"$work/tuning.file"
awk -F ' *\\| *' '
    /^\| settings \|/ { table++; next }
    !/^\|/ { if (table) after = table }
    table > after && NF == 7 && !/^\|-/ {
        name = $2
        gsub(/`/, "", name)
        gsub(/,/, " ", name)
        if (name == "the defaults" || name == "the limit alone") name = "default"
        print (table == 2 ? "limit " : "") name "|" $3 "|" $4 "|" $5 "|" $6
    }' docs/tuning.md >"$work/tuning"
grep -vxFf "$work/tuning.file" "$work/tuning" >"$work/out"
[ ! -s "$work/out" ] && [ "$(wc -l <"$work/tuning")" -ge 14 ]
verdict $? "figures of docs/tuning.md that its file does not have:" "$work/out"

# Tests that the design names, one or several in a row of its tables of rules.
awk '/^\| rule \| test \|$/ { inside = 1; next } !/^\|/ { inside = 0 } inside' docs/design.md | sed 's/^| [^|]*|//' |
    grep -oE '`[a-z0-9_]+`' | tr -d '`' >"$work/tests.named"
[ -s "$work/tests.named" ]
verdict $? "docs/design.md names no tests"
while read -r name; do
    grep -q "^TEST($name)" tests/unit/*.c tests/stress/*.c || echo "$name"
done <"$work/tests.named" >"$work/tests"
empty "docs/design.md names tests that are not there" "$work/tests"

# Keys of GALLOC_CONF: those of the table are those that the parser knows.
sed -n 's/^| `\([a-z0-9_]*\)` .*/\1/p' docs/settings.md | sort >"$work/keys.docs"
sed -n '/gai_keys\[\]/,/};/p' galloc.h | grep -oE '\{"[a-z0-9_]+"' | tr -d '{"' | sort >"$work/keys.header"
[ -s "$work/keys.header" ] && diff "$work/keys.docs" "$work/keys.header" >"$work/out"
verdict $? "the keys of GALLOC_CONF in docs/settings.md and in galloc.h differ:" "$work/out"

awk 'length($0) > 120 { print FILENAME ":" FNR ": " length($0) " columns" }' \
    $texts $(find examples -type f) tests/gpu/* bench/*.sh \
    >"$work/long"
empty "lines over 120 columns" "$work/long"

count_verdicts
