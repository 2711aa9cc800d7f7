#!/bin/sh
# galloc-view.sh SNAPSHOT >PAGE.html - docs/viewer.html with a snapshot in it (JSON, pickle, either with gzip): one file
# that shows the snapshot wherever it is opened. The data stand there as base64, of whose letters no HTML can be made,
# so that nothing in a snapshot becomes part of the page.

export LC_ALL=C # numbers have a point, whatever the locale
page=$(dirname "$0")/../docs/viewer.html
place='<!-- galloc-view.sh puts a file of data in the place of this line -->'

[ $# -eq 1 ] && [ -f "$1" ] && [ -r "$1" ] || {
    echo "usage: galloc-view.sh SNAPSHOT >PAGE.html; SNAPSHOT is a file that galloc_snapshot_save has written" >&2
    exit 2
}
[ "$(grep -cxF "$place" "$page")" = 1 ] || {
    echo "galloc-view.sh: $page has no place for data" >&2
    exit 1
}
line=$(grep -nxF "$place" "$page" | cut -d: -f1)
head -n $((line - 1)) "$page" &&
    printf '<script type="application/octet-stream" id="embedded" data-name="%s">\n' \
        "$(basename -- "$1" | tr -d '\n' | base64 | tr -d '\n')" &&
    base64 <"$1" &&
    printf '</script>\n' &&
    tail -n +$((line + 1)) "$page"
