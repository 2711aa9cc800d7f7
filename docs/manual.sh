#!/bin/sh
# manual.sh - writes the manual at the top of galloc.h as a page of the site (docs/site.sh).
#
# Its form: headings in capitals at three columns; paragraphs at five, where "Term: " after the end of a sentence begins
# a new one; items and numbered steps; DO THIS and OPTIONS are code and a table, and stay as they are.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1

awk '
function leave() {
    if (as_is) print "```"
    else if (text != "") print text
    if (as_is || text != "") print ""
    as_is = 0
    text = ""
}
function begin(mark, words) {
    if (text != "" && !(item && mark != "")) { print text; print "" }
    else if (text != "") print text
    item = mark != ""
    text = mark words
}
function heading(words) {
    leave()
    words = substr(words, 1, 1) tolower(substr(words, 2))
    sub(/pytorch/, "PyTorch", words)
    print "## " words "\n"
}
function plain(words) {
    gsub(/[*<>|\[\]]/, "\\\\&", words)
    return words
}
NR == 1 { print "# The manual\n\nThe comment at the top of [galloc.h](../galloc.h).\n"; next }
/\*\/$/ { exit } # the last line is for readers of the header
/^   [A-Z][A-Z ]+$/ {
    heading(substr($0, 4))
    as_is = /DO THIS/
    if (as_is) print "```text"
    next
}
/^   OPTIONS / { heading("OPTIONS"); as_is = 1; print "```text"; sub(/OPTIONS/, "       ") }
as_is { print substr($0, 4); next }
/^ *$/ { leave(); next }
{
    match($0, /^ */)
    indent = RLENGTH
    words = plain(substr($0, indent + 1))
    ends = before ~ /[.)]$/
    before = $0
}
/^ +- / { begin("* ", substr(words, 3)); next }
/^ +[0-9]  [a-zA-Z]/ { begin(words + 0 ". ", substr(words, 4)); next }
indent <= 5 && ends && match(words, /^[A-Za-z_]+([ ,][A-Za-z ,]*)?: /) && RLENGTH < 40 {
    begin("", "**" substr(words, 1, RLENGTH - 2) ":** " substr(words, RLENGTH + 1))
    next
}
indent <= 5 && item { begin("", words); next }
{ text = text (text == "" ? "" : " ") words }
END { leave() }' galloc.h
