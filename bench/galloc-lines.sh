#!/bin/sh
# galloc-lines.sh SNAPSHOT.json >OUT.json - source files and lines in place of offsets in the frames of a snapshot (JSON
# or JSON with gzip) with stacks. It asks addr2line (ADDR2LINE) about the files that the frames name, so it runs on
# the machine and in the folder where the program ran. A frame stays as it is if its file cannot be read, which the
# script says once for each file, if addr2line knows nothing of it, or if its names have control characters.

export LC_ALL=C # numbers have a point, whatever the locale
[ $# -eq 1 ] && [ -f "$1" ] && [ -r "$1" ] || {
    echo "usage: galloc-lines.sh SNAPSHOT.json >OUT.json; the snapshot of a pool with history_stacks" >&2
    exit 2
}
[ "$(gzip -cdf <"$1" 2>/dev/null | head -c 1)" = "{" ] || {
    echo "galloc-lines.sh: $1 is no snapshot in JSON: save one as galloc_snapshot_save(pool, \"name.json\")" >&2
    exit 2
}
addr2line=${ADDR2LINE:-addr2line}
command -v "$addr2line" >/dev/null 2>&1 || {
    echo "galloc-lines.sh: $addr2line is not found. On Debian: apt install binutils" >&2
    exit 1
}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
gzip -cdf <"$1" >"$work/snapshot" || exit 1

# Each file and offset once. File names stay as JSON has them, but where a file is opened.
awk 'BEGIN { RS = "{" }
    match($0, /^"filename":"([^"\\]|\\.)+","line":[0-9]+,/) && !/^"filename":"(galloc|\?\?)"/ {
        frame = substr($0, 13, RLENGTH - 13)
        match(frame, /","line":[0-9]+$/)
        print substr(frame, RSTART + 9) "\t" substr(frame, 1, RSTART - 1)
    }' "$work/snapshot" | sort -u | sort -k 2 >"$work/frames"
cut -f 2 "$work/frames" | uniq | while IFS= read -r file; do
    path=$(printf '%s\n' "$file" | sed 's/\\\(["\\]\)/\1/g')
    [ -r "$path" ] || {
        printf 'galloc-lines.sh: %s cannot be read here: its frames stay as they are\n' "$path" >&2
        continue
    }
    FILE=$file awk -F '\t' '$2 == ENVIRON["FILE"] { print $1 }' "$work/frames" >"$work/offsets"
    xargs printf '0x%x\n' <"$work/offsets" | "$addr2line" -f -C -e "$path" 2>/dev/null | paste - - >"$work/found"
    FILE=$file awk '{ print ENVIRON["FILE"] "\t" $0 }' "$work/offsets" | paste - "$work/found"
done >"$work/known"

[ -s "$work/known" ] || echo "galloc-lines.sh: no frame names a file that is here" >&2
awk -F '\t' '
    FILENAME != snapshot {
        sub(/ \(discriminator [0-9]+\)$/, "", $4)
        if (!match($4, /:[0-9]+$/) || $4 ~ /^\?/ || /[\001-\010\013-\037]/ || NF > 4) next
        gsub(/["\\]/, "\\\\&", $3)
        file = substr($4, 1, RSTART - 1)
        gsub(/["\\]/, "\\\\&", file)
        place[$1 "\",\"line\":" $2] = file "\",\"line\":" substr($4, RSTART + 1) ",\"name\":\"" $3 "\""
        next
    }
    {
        if (begun++) printf "{"
        if (match($0, /^"filename":"([^"\\]|\\.)+","line":[0-9]+/)) {
            key = substr($0, 13, RLENGTH - 12)
            match($0, /^"filename":"([^"\\]|\\.)*","line":[0-9]+,"name":"([^"\\]|\\.)*"/)
            if (key in place) $0 = "\"filename\":\"" place[key] substr($0, RLENGTH + 1)
        }
        printf "%s", $0
    }' snapshot="$work/snapshot" "$work/known" RS='{' "$work/snapshot"
