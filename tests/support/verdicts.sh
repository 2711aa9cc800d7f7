# verdicts.sh - for the scripts of tests/checks, which source it in the project's folder, with $work naming a folder of
# their own: it is made anew, and what holds is counted. $said names the file that says more of what does not hold,
# unless a verdict names another one; it may be empty.

export LC_ALL=C # numbers have a point, whatever the locale
passed=0 failed=0
said=$work/out
rm -rf "$work" && mkdir -p "$work" || exit 1

right() { passed=$((passed + 1)); }

wrong() { # what is wrong, file that says more
    failed=$((failed + 1))
    echo "FAILED $1"
    [ ! -s "${2-$said}" ] || head -n 30 "${2-$said}"
}

verdict() { # 0 when it holds, what is wrong otherwise, file that says more
    status_given=$1
    shift
    if [ "$status_given" -eq 0 ]; then right; else wrong "$@"; fi
}

empty() { # what is wrong if the file is not empty, file
    if [ -s "$2" ]; then wrong "$1:" "$2"; else right; fi
}

holds() { # what, command...
    what=$1
    shift
    if "$@" >"$work/out" 2>&1; then right; else wrong "$what" "$work/out"; fi
}

# The last line of a script, and its status.
count_verdicts() {
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ] && [ $passed -gt 0 ]
}
