#!/bin/sh
# site.sh VENV - the pages of the repository as one static site, build/site: README.md is its first page, docs/ and the
# other pages keep their places, examples are pages of their own, files that are linked lie beside them. Strict: a link
# that leads nowhere, or a page that no list has, is an error. `make docs` calls it.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
venv=$1
source=build/site-source
site=build/site

rm -rf "$source" "$site" && mkdir -p "$source" || exit 1

# A page in its place; the first page is index.md there, and an example is a page.
page() { # file
    to=$source/$1
    up=$(dirname "$1" | sed 's|^\.$||; s|[^/]\{1,\}|..|g; s|\.\.$|../|')
    [ "$1" != README.md ] || to=$source/index.md
    mkdir -p "$(dirname "$to")"
    sed -E "s#\]\(${up}README\.md#](${up}index.md#g; s#^(\[[^]]+\]: )${up}README\.md#\1${up}index.md#
        s#\]\(((\.\./)*examples/[A-Za-z0-9_]+\.(c|cu|cpp))\)#](\1.md)#g" "$1" >"$to"
}

for file in README.md CHANGELOG.md docs/*.md tests/README.md tests/mutants/README.md bench/results/README.md \
    $(find examples -name README.md); do
    page "$file"
done

# The manual is a page here, too.
manual=manual
docs/$manual.sh >"$source/docs/$manual.md"
index=$source/docs/index.md
sed 's#the manual at the top of \[galloc.h\](../galloc.h)#[the manual](manual.md)#' "$index" >"$index.new" &&
    mv "$index.new" "$index"

# What the pages link to, and is no page, lies where they say.
(cd "$source" && find . -name '*.md') | while read -r file; do
    folder=$(dirname "$file")
    grep -oE '(\]\(|^\[[^]]+\]: )[^):# ]+' "$source/$file" | sed -E 's/^(\]\(|\[[^]]+\]: )//' | while read -r link; do
        [ -f "$folder/$link" ] && [ ! -e "$source/$folder/$link" ] || continue
        mkdir -p "$(dirname "$source/$folder/$link")"
        cp "$folder/$link" "$source/$folder/$link"
    done
done

mkdir -p "$source/examples"
for file in examples/*; do
    case $file in *.c) language=c ;; *.cu | *.cpp) language=cpp ;; *) continue ;; esac
    printf '# %s\n\n```%s\n' "$(basename "$file")" "$language" >"$source/$file.md"
    cat "$file" >>"$source/$file.md"
    printf '```\n' >>"$source/$file.md"
done

list() { # title, pages
    printf '\n```{toctree}\n:hidden:\n:caption: %s\n\n' "$1"
    shift
    for file; do echo "${file%.md}"; done
    printf '```\n'
}

{
    list "Begin" docs/index.md docs/when-not.md docs/migrate.md docs/faq.md docs/simulated-device.md
    list "Look up" docs/$manual.md docs/api.md docs/settings.md docs/tuning.md docs/what-if.md \
        docs/viewer.md docs/history.md docs/guards.md docs/nvtx.md docs/figures.md bench/results/README.md CHANGELOG.md
    # shellcheck disable=SC2046 # words
    list "Examples" $(cd "$source" && find examples -name '*.md' | sort)
    list "Inside" docs/design.md docs/experiments.md tests/README.md tests/mutants/README.md
} >>"$source/index.md"

"$venv/bin/python" -m sphinx -q -W --keep-going -b html -c docs -d build/site-doctrees "$source" "$site" || exit 1
echo "  $site/index.html"
