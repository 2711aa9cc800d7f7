#!/bin/sh
# check_tree.sh - the repository is in order: names of files are unique, nothing is left over, paths that are named
# exist, tests/README.md names each folder, and mutants have their form and apply to galloc.h.
# Environment: BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
work=${BUILD:-build}/check_tree

. tests/support/verdicts.sh

# ---- names ----------------------------------------------------------------------------------------------------------

# Programs, scripts and mutants are called by their names alone.
find galloc.h bench docs examples tests .ci -type f >"$work/files"
grep -E '\.(c|h|cu|cpp|sh)$|/mutants/.*\.txt$' "$work/files" >"$work/named"
[ -s "$work/named" ] || echo "no files at all" >"$work/none"
empty "files" "$work/none"
sed 's|.*/||' "$work/named" | sort | uniq -d | while read -r name; do grep -E "(^|/)$name\$" "$work/named"; done \
    >"$work/twice"
empty "files of the same name" "$work/twice"

find . -name .git -prune -o -path ./build -prune -o \( -name '*.orig' -o -name '*.rej' -o -name '*~' \) -print \
    >"$work/left"
empty "leftovers of patches and editors" "$work/left"

grep -E '\.sh$|\.ci/' "$work/files" | xargs grep -LE '^export LC_ALL=C( |$)|verdicts\.sh$' >"$work/locale"
empty "scripts whose numbers depend on the locale: export LC_ALL=C" "$work/locale"

# ---- paths ----------------------------------------------------------------------------------------------------------

# What is named in texts, scripts and comments; with a * it is a pattern.
grep -rnoE '(^|[^A-Za-z0-9_./$-])(tests|bench|docs|examples)/[A-Za-z0-9_./*-]*[A-Za-z0-9_*/]' README.md Makefile .ci \
    docs examples tests bench --include=*.md --include=*.sh --include=*.[ch] --include=*.cu --include=*.cpp \
    --include=Makefile --include=run |
    sed -E 's/^([^:]*:[0-9]*:)[^A-Za-z]?/\1 /' | sort -u >"$work/paths"
while read -r where path; do
    # shellcheck disable=SC2086 # a pattern
    ls -d $path >/dev/null 2>&1 || echo "$where $path"
done <"$work/paths" >"$work/nowhere"
[ -s "$work/paths" ] || echo "no paths found" >"$work/nowhere"
empty "paths that lead nowhere" "$work/nowhere"

for folder in tests/*/; do
    folder=${folder#tests/}
    grep -q "^| \`$folder\` |" tests/README.md || echo "$folder"
done >"$work/untold"
empty "folders that tests/README.md does not name" "$work/untold"

# ---- mutants --------------------------------------------------------------------------------------------------------

find tests/mutants -name '*.txt' | sort | xargs tests/mutate.sh --check >"$work/mutants" 2>&1
empty "mutants" "$work/mutants"

# A mutant, or all of a folder, by each of the names that tests/mutants.sh takes.
one=$(find tests/mutants -name '*.txt' | head -n 1)
of=${one#tests/mutants/}
all=$(tests/mutants.sh --list "${of%/*}")
for name in "$one" "$of" "${of%.txt}" "$(basename "$of" .txt)"; do
    [ "$(tests/mutants.sh --list "$name")" = "$(basename "$of" .txt)" ] || echo "$name"
done >"$work/names"
for name in "tests/mutants/${of%/*}" "tests/mutants/${of%/*}/"; do
    [ "$all" ] && [ "$(tests/mutants.sh --list "$name")" = "$all" ] || echo "$name"
done >>"$work/names"
empty "names that tests/mutants.sh does not know" "$work/names"

count_verdicts
