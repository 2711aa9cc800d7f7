#!/bin/sh
# check_plots.sh - the charts of docs/ belong to the files of bench/results that they name: each says in its first lines
# what it was drawn from, with the SHA-256 of that file (bench/plots/plots.py writes them; `make plots` draws anew).
# Pictures show in light and dark, ask no other host for anything, and are on a page. Neither matplotlib nor a network
# is needed. Environment: BUILD (a folder to work in), DOCS (another folder of pictures).

cd "$(dirname "$0")/../.." || exit 1
work=${BUILD:-build}/check_plots
docs=${DOCS:-docs}

. tests/support/verdicts.sh

grep -oE '<!-- drawn from [^ ]+ sha256 [0-9a-f]{64} -->' "$docs"/*.svg |
    sed 's/:<!-- drawn from / /; s/ sha256 / /; s/ -->//' >"$work/stamps"
while read -r chart file digest; do
    [ "$(sha256sum <"$file" 2>/dev/null)" = "$digest  -" ] || echo "$chart: not of this $file"
done <"$work/stamps" >"$work/old"
empty "charts that \`make plots\` must draw anew" "$work/old"

# Every chart that the program can draw is there, with its stamp; not those whose file has not been measured.
sed -n 's/^CHARTS = {\(.*\)}$/\1/p' bench/plots/plots.py | grep -oE '"[a-z]+"' | tr -d '"' >"$work/charts"
while read -r name; do
    needs=$(sed -n "s/^NEEDS = {.*\"$name\": \"\([^\"]*\)\".*/\1/p" bench/plots/plots.py)
    [ -e "bench/results/$needs" ] || continue
    grep -q "^$docs/$name.svg " "$work/stamps" || echo "$docs/$name.svg"
done <"$work/charts" >"$work/missing"
[ -s "$work/charts" ] || echo "bench/plots/plots.py names no charts" >>"$work/missing"
empty "charts that are not there, or do not say what they were drawn from" "$work/missing"

for picture in "$docs"/*.svg; do
    grep -q 'prefers-color-scheme: dark' "$picture" || echo "$picture: one look for light and dark"
    grep -nE '(href|src)="[a-z]+:|url\([a-z]+:|@import|<script' "$picture" | sed "s|^|$picture:|"
    grep -qE "\]\((docs/)?$(basename "$picture")\)|src=\"(docs/)?$(basename "$picture")\"" README.md docs/*.md ||
        echo "$picture: on no page"
done >"$work/pictures"
empty "pictures" "$work/pictures"

count_verdicts
