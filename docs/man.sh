#!/bin/sh
# man.sh - writes galloc(3), the manual page: the manual at the top of galloc.h, and the prototypes of all public
# functions. `make install` puts it into share/man/man3.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1

awk '
function escaped(s) { gsub(/\\/, "\\e", s); gsub(/-/, "\\-", s); if (s ~ /^[.'"'"']/) s = "\\&" s; return s }
function leave_list() { if (listing) print ".PP"; listing = 0 }
function as_is(on) { if (on != fixed) print on ? ".nf" : ".fi"; fixed = on }

FNR == 1 && NR == 1 {
    title = $0
    sub(/^.* - a /, "a ", title)
    sub(/ - MIT.*/, "", title)
    printf ".TH GALLOC 3 \"\" \"galloc %s\" \"galloc\"\n.nh\n.ad l\n.SH NAME\ngalloc \\- %s\n", substr($4, 2), escaped(title)
    manual = 1
    next
}
# The manual: headings at three columns in capitals, text at five (the introduction: at three), code and tables deeper.
manual && /\*\/$/ { as_is(0); manual = 0 } # the last line is for readers of the header
manual && !started && NF { print ".SH DESCRIPTION"; started = 1 }
manual && /^   [A-Z][A-Z ]+$/ {
    as_is(0)
    listing = 0
    line = $0
    sub(/^ */, "", line)
    print ".SH " line
    table = line == "DO THIS"
    next
}
manual && /^   OPTIONS / {
    as_is(0)
    listing = 0
    print ".SH OPTIONS"
    table = 1
    as_is(1)
    line = $0
    sub(/^   OPTIONS/, "       ", line)
    print escaped(line)
    next
}
manual && !NF {
    if (fixed) print ""
    else if (!listing) print ".PP"
    if (!table) listing = 0
    next
}
manual && table {
    as_is(1)
    line = $0
    sub(/^   /, "", line)
    print escaped(line)
    next
}
manual && match($0, /^ *(- |[0-9]  )/) {
    mark = $0
    sub(/^ */, "", mark)
    text = mark
    sub(/^(- |[0-9]  )/, "", text)
    print mark ~ /^-/ ? ".IP \\(bu 2" : ".IP " substr(mark, 1, 1) " 3"
    print escaped(text)
    listing = 1
    indent = match($0, /[-0-9]/)
    next
}
manual {
    if (listing && match($0, /[^ ]/) <= indent) leave_list()
    line = $0
    sub(/^ +/, "", line)
    if (line ~ /^[A-Z][A-Za-z ]+: / && !listing) {
        head = line
        sub(/:.*/, "", head)
        sub(/^[^:]*: */, "", line)
        print ".PP\n.B " escaped(head) ":"
    }
    print escaped(line)
    next
}
# The prototypes, from the declarations.
/^GALLOC_API/ { collect = ""; collecting = 1 }
collecting {
    collect = collect (collect == "" ? "" : " ") $0
    if (/;$/) {
        sub(/^GALLOC_API /, "", collect)
        gsub(/  +/, " ", collect)
        prototypes = prototypes escaped(collect) "\n"
        collecting = 0
    }
}
/^#endif \/\* GALLOC_H \*\// { exit }
END {
    printf ".SH FUNCTIONS\n.nf\n#include <galloc.h>\n\n%s.fi\n", prototypes
    print "The comments in galloc.h describe arguments, results and errors of each function."
    print ".SH SEE ALSO\nThe examples and documents that come with galloc."
}' galloc.h
