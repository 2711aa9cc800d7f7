#!/bin/sh
# figures.sh - are the figures of README.md and docs/ those of their files? tests/support/figures.txt says which figure
# comes from where; its first lines describe it. Between figures:begin and figures:end of a page no other numbers may
# stand. Prints what differs. Environment: FIGURES (another list).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1

awk -v list="${FIGURES:-tests/support/figures.txt}" '
function complain(what) { print what; failed++ }
function squeeze(text) { gsub(/[ \t\n]+/, " ", text); return text }

# The page as one line; its regions of figures as another. What is in comments or is a link target is no text.
function read_page(page,   line, inside) {
    if (page in pages) return
    pages[page] = regions[page] = ""
    while ((getline line < page) > 0) {
        if (line ~ /figures:begin/) inside = 1
        if (line ~ /figures:end/) inside = 0
        pages[page] = pages[page] " " line
        if (inside && line !~ /^(<!--.*-->|\[[^]]*\]: .*)$/) regions[page] = regions[page] " " line
    }
    close(page)
    pages[page] = squeeze(pages[page])
    regions[page] = squeeze(regions[page])
}

# A value of a row: a word or field by its number, the word before another one, the field of a name (jsonl), each also
# over or times a number.
function value(line, column, json,   n, f, operator, by, key) {
    operator = ""
    if (match(column, /[*\/]/)) {
        operator = substr(column, RSTART, 1)
        by = substr(column, RSTART + 1)
        column = substr(column, 1, RSTART - 1)
    }
    if (json) {
        key = "\"" column "\": "
        n = index(line, key)
        if (!n) return "missing"
        line = substr(line, n + length(key)) + 0
    } else {
        n = split(line, f, separator)
        if (column ~ /^</) {
            for (key = 2; key <= n; key++) if (f[key] == substr(column, 2)) break
            column = key - 1
        }
        if (column + 0 > n || column + 0 < 1) return "missing"
        line = f[column]
        gsub(/[^0-9.e-]/, "", line)
        line += 0
    }
    return operator == "/" ? line / by : operator == "*" ? line * by : line
}

# Does a line have all the parts of a row, each after a "~"?
function has_all(line, row,   part, n, i) {
    n = split(substr(row, 2), part, " ~")
    for (i = 1; i <= n; i++) if (!index(line, part[i])) return 0
    return 1
}

# The geometric means of the rounds of a measurement, whose lines stand round by round: the least, or the most of them.
function mean_of_rounds(kind, i, rounds, rounds_n,   r, best, v) {
    for (r = 1; rounds_n[i, r]; r++) {
        v = exp(rounds[i, r] / rounds_n[i, r])
        if (rounds_n[i, r] != rounds_n[i, 1]) return "missing"
        if (best == "" || (kind == "minround" ? v < best : v > best)) best = v
    }
    return best
}

# Adds the values that a line of the list names: file: section; row; columns
function source(spec, where,   file, section, row, columns, part, line, joined, inside, n, i, c, found, v, kind, json,
    seen, rounds, rounds_n, round) {
    file = "bench/results/" substr(spec, 1, index(spec, ": ") - 1)
    n = split(substr(spec, index(spec, ": ") + 2), part, / *; */)
    if (n != 3) { complain(where ": not three parts: " spec); return }
    section = part[1]; row = part[2]
    json = file ~ /\.jsonl$/
    separator = file ~ /\.csv$/ ? "," : " "
    c = split(part[3], columns, " ")
    split("", rounds)
    split("", rounds_n)
    split("", seen)
    for (i = 1; i <= c; i++) { sum[i] = 0; logs[i] = 0; most[i] = least[i] = last[i] = "" }
    inside = section == ""
    while ((getline line < file) > 0) {
        if (section != "" && index(line, section) == 1) { inside = 1; continue }
        if (section != "" && inside && line ~ /^ *$/) inside = 0
        if (!inside || line ~ /^#/) continue
        joined = line
        gsub(/[ ,]+/, " ", joined)
        sub(/^ /, "", joined)
        if (row ~ /^~/ ? !has_all(line, row) : row != "" && index(joined " ", row " ") != 1) continue
        if (row == "" && (json ? line !~ /^\{/ : line ~ /^(geometric mean|worst|trace)/)) continue
        found++
        match(line, /"trace": "[^"]*"/)
        round = ++seen[substr(line, RSTART, RLENGTH)]
        for (i = 1; i <= c; i++) {
            kind = columns[i]
            sub(/\(.*/, "", kind)
            v = columns[i]
            if (sub(/^[a-z]+\(/, "", v)) sub(/\)$/, "", v)
            if (kind == "less") v = 100 * (1 - value(line, substr(v, 1, index(v, ",") - 1), json) / \
                value(line, substr(v, index(v, ",") + 1), json))
            else v = value(line, v, json)
            if (v == "missing") { complain(where ": no " columns[i] " in " file); continue }
            last[i] = v
            sum[i] += v
            if (v > 0) { logs[i] += log(v); rounds[i, round] += log(v); rounds_n[i, round]++ }
            if (most[i] == "" || v > most[i]) most[i] = v
            if (least[i] == "" || v < least[i]) least[i] = v
        }
    }
    close(file)
    if (!found) { complain(where ": no such row in " file ": " section "; " row); return }
    for (i = 1; i <= c; i++) {
        if (columns[i] ~ /^geomean\(/) v = exp(logs[i] / found)
        else if (columns[i] ~ /^(min|max)round\(/) v = mean_of_rounds(substr(columns[i], 1, 8), i, rounds, rounds_n)
        else if (columns[i] ~ /^max\(/) v = most[i]
        else if (columns[i] ~ /^min\(/) v = least[i]
        else if (columns[i] ~ /^sum\(/) v = sum[i]
        else {
            v = last[i]
            if (found > 1) complain(where ": " found " rows in " file ": " section "; " row)
        }
        values[++n_values] = v
    }
}

BEGIN {
    RS = ""
    while ((getline record < list) > 0) {
        n = split(record, lines, "\n")
        if (lines[1] ~ /^#/) continue
        where = lines[1]
        page = substr(where, 1, index(where, ": ") - 1)
        text = substr(where, index(where, ": ") + 2)
        n_values = 0
        RS = "\n"
        if (page !~ /^plain /) for (i = 2; i <= n; i++) source(lines[i], where)
        sub(/^plain /, "", page)
        read_page(page)
        RS = ""
        # Each conversion takes the next value.
        used = 0
        out = ""
        while (n > 1 && match(text, /%\.?[0-9]*[dfg]/)) {
            v = values[++used]
            v = substr(text, RSTART, RLENGTH) ~ /d$/ ? int(v) : v * (1 + 1e-12) # 0.5 becomes 1
            out = out substr(text, 1, RSTART - 1) sprintf(substr(text, RSTART, RLENGTH), v)
            text = substr(text, RSTART + RLENGTH)
        }
        text = squeeze(out text)
        if (n > 1 && used != n_values) complain(where ": " used " figures in the text, " n_values " in files")
        if (!index(pages[page], text)) complain(page " does not say: " text)
        checked += n > 1
        while ((at = index(regions[page], text)) > 0)
            regions[page] = substr(regions[page], 1, at - 1) " ~ " substr(regions[page], at + length(text))
    }
    for (page in regions) {
        text = regions[page]
        gsub(/\]\([^)]*\)/, "]", text)
        gsub(/`[^`]*`/, "", text)
        while (match(text, /[0-9]+([.][0-9]+)?/)) {
            before = RSTART > 1 ? substr(text, RSTART - 1, 1) : " "
            if (before !~ /[A-Za-z_]/)
                complain(page ": a number that tests/support/figures.txt does not know: " \
                    substr(text, RSTART > 30 ? RSTART - 30 : 1, RLENGTH + 40))
            text = substr(text, RSTART + RLENGTH)
        }
    }
    if (!checked) complain("no figures")
    exit failed > 0
}'
