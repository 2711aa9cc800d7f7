#!/bin/sh
# mutate.sh MUTANT RESULT - writes galloc.h with the replacements of a mutant made, or says what is wrong with that. A
# mutant is named by its name, or by its file in tests/mutants.

cd "$(dirname "$0")/.." || exit 1
file=$1
[ -e "$file" ] || file=$(find tests/mutants -name "$1.txt")
[ -e "$file" ] || {
    echo "there is no one mutant that is called $1" >&2
    exit 1
}
awk -v mutant="$file" '
    function stop(why) { print mutant ": " why > "/dev/stderr"; exit 1 }
    BEGIN {
        RS = "\001" # the whole file is one record
        getline whole < "galloc.h"
        RS = "\n"
        while ((getline line < mutant) > 0) {
            if (line == "--- old") n++
            if (line ~ /^---/) part = line
            else if (part == "--- old") old[n] = old[n] line "\n"
            else if (part == "--- new") new[n] = new[n] line "\n"
        }
        if (!n) stop("nothing to replace")
        for (i = 1; i <= n; i++) {
            at = index(whole, old[i])
            if (old[i] == "" || old[i] == new[i]) stop("no change")
            if (!at) stop("this is not in galloc.h:\n" old[i])
            rest = substr(whole, at + length(old[i]))
            if (index(rest, old[i])) stop("this is in galloc.h twice:\n" old[i])
            whole = substr(whole, 1, at - 1) new[i] rest
        }
        printf "%s", whole
    }' >"$2"
