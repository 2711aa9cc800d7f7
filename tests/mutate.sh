#!/bin/sh
# mutate.sh MUTANT RESULT - writes galloc.h with the replacements of a mutant made, or says what is wrong with that. A
# mutant is named by its name, or by its file in tests/mutants. `mutate.sh --check FILE...` says what is wrong with each
# of these mutants, their form included, and writes nothing.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
if [ "$1" = --check ]; then
    shift
    result=/dev/null check=1
else
    file=$1 result=$2 check=
    [ -e "$file" ] || file=$(find tests/mutants -name "$1.txt")
    [ -e "$file" ] || {
        echo "there is no one mutant that is called $1" >&2
        exit 1
    }
    set -- "$file"
fi
awk -v check="$check" '
    function wrong(why) { print mutant ": " why > "/dev/stderr"; status = 1 }

    # Reads a mutant: old[1..n], new[1..n], and the tests that it names.
    function read_mutant(   line, part, first, tests) {
        n = 0
        split("", old)
        split("", new)
        while ((getline line < mutant) > 0) {
            if (!first++ && check && line !~ /^#/) wrong("does not begin with what it breaks")
            if (line == "--- old") n++
            if (line ~ /^---/) part = line
            else if (part == "--- old") old[n] = old[n] line "\n"
            else if (part == "--- new") new[n] = new[n] line "\n"
            else if (sub(/^(tests|each|tsan|hangs): */, "", line)) tests = tests " " line
        }
        close(mutant)
        if (check) check_names(tests)
    }

    function check_names(tests,   count, list, i, program) {
        count = split(tests, list, " ")
        if (!count) wrong("names no tests")
        for (i = 1; i <= count; i++) {
            program = list[i]
            sub(/:.*/, "", program)
            if (!exists("tests/unit/" program ".c") && !exists("tests/stress/" program ".c"))
                wrong("there is no " program)
        }
        if (split(mutant, list, "/") != 4) wrong("not in a folder of a subject")
    }

    function exists(path,   line, got) {
        if (!(path in known)) {
            got = getline line < path
            close(path)
            known[path] = got >= 0
        }
        return known[path]
    }

    # galloc.h with the replacements made.
    function mutated(   whole, i, at, rest) {
        whole = header
        if (!n) wrong("nothing to replace")
        for (i = 1; i <= n; i++) {
            at = index(whole, old[i])
            rest = substr(whole, at + length(old[i]))
            if (old[i] == "" || old[i] == new[i]) wrong("no change")
            else if (!at) wrong("this is not in galloc.h:\n" old[i])
            else if (index(rest, old[i])) wrong("this is in galloc.h twice:\n" old[i])
            else whole = substr(whole, 1, at - 1) new[i] rest
        }
        return whole
    }

    BEGIN {
        RS = "\001" # the whole file is one record
        getline header < "galloc.h"
        RS = "\n"
        for (k = 1; k < ARGC; k++) {
            mutant = ARGV[k]
            read_mutant()
            text = mutated()
            if (!check && !status) printf "%s", text
        }
        exit status
    }' "$@" >"$result"
