#!/bin/sh
# api.sh - writes docs/api.md: the public functions of galloc.h by task, from the header's comments. `make docs-api`
# puts it in its place, tests/checks/check_docs.sh sees that it is there. A function that the list below lacks is an error.
#
# The comment of a function: paragraphs at three columns; at five, "- " items, terms of a list, and then arguments and
# tags (Returns, Streams, Threads, Device), each with its text after two blanks or more. What a function does not say
# stands in the first comment of the section, which begins the page.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1

tasks='Allocate: malloc alloc pool_malloc malloc_growable resize override_malloc
Free: free free_after override_free
Streams: record_stream stream_retire
CUDA graphs: graph_begin graph_end graph_release
Pools: pool_default pool_create pool_destroy
Reserve and give back: pool_reserve pool_trim pool_sync_point pool_set_limit
Settings: config_default config_parse config_print pool_config pool_decisions pool_freeze
Statistics and addresses: pool_stats pool_stats_reset pool_torch_stats pool_streams pointer_info
Snapshots and history: snapshot snapshot_save live_text pool_history pool_history_stacks annotate tag_name
Running out: oom_report report_text pool_set_callbacks
Errors and checks: last_message set_log pool_check
Shutdown: shutdown'

awk -v tasks="$tasks" '
function fail(what) { print "api.sh: " what >"/dev/stderr"; failed = 1 }

# A word of the text: names are set as code, names of functions lead to them.
function word(w,   name, before, after, code) {
    if (!match(w, /(galloc_[a-z0-9_]+|GALLOC_[A-Z_]+|cuda[A-Z][A-Za-z]+|UINT64_MAX|SIZE_MAX|NULL|on_[a-z]+|longjmp)/))
        return w
    before = substr(w, 1, RSTART - 1)
    name = substr(w, RSTART, RLENGTH)
    after = substr(w, RSTART + RLENGTH)
    if (before !~ /^[(*]*$/) return w
    if (match(after, /^[.=:][a-zA-Z_.]*[a-z_A-Z]/)) { # a member, a value
        name = name substr(after, 1, RLENGTH)
        after = substr(after, RLENGTH + 1)
    }
    if (match(after, /^\([^ ]*\)/)) { name = name substr(after, 1, RLENGTH); after = substr(after, RLENGTH + 1) }
    if (sub(/\*$/, "", before)) name = "*" name
    code = "`" name "`"
    if ((name in known) && name != current) code = "[" code "](#" name ")"
    return before code after
}
# Text outside backticks, word by word; lines of at most 118 columns, those after the first with an indent.
function flow(text, first, indent,   n, part, i, m, w, j, line, out) {
    n = split(text, part, "`")
    text = ""
    for (i = 1; i <= n; i++) {
        if (i % 2 == 0) { text = text "`" part[i] "`"; continue }
        m = split(part[i], w, " ")
        if (part[i] ~ /^ / && i > 1) text = text " "
        for (j = 1; j <= m; j++) {
            if (w[j] ~ /^[*][a-z]+$/) w[j] = "`" w[j] "`"
            text = text word(w[j]) (j < m ? " " : "")
        }
        if (part[i] ~ / $/ && m) text = text " "
    }
    m = split(text, w, " ")
    line = first
    for (j = 1; j <= m; j++) {
        if (length(line) + 1 + length(w[j]) > 118 && line ~ /[^ ]/) { out = out line "\n"; line = indent w[j] }
        else line = line (line ~ /[^ ]$/ ? " " : "") w[j]
    }
    return out line "\n"
}
function put(kind, text) { count++; kinds[count] = kind; texts[count] = text }

# The lines of a comment, as paragraphs, items, terms and tags of `name`.
function read_comment(name, parameters,   i, line, tag, rest) {
    count = 0
    for (i = 1; i <= lines; i++) {
        line = comment[i]
        if (line ~ /^     - /) put("item", substr(line, 8))
        else if (line ~ /^     [^ ]/) {
            tag = line
            sub(/^ */, "", tag)
            if (match(tag, /  +/)) { rest = substr(tag, RSTART + RLENGTH); tag = substr(tag, 1, RSTART - 1) }
            else { rest = tag; sub(/^[^ ]+ */, "", rest); sub(/ .*/, "", tag) }
            put(tag ~ /^(Returns|Streams|Threads|Device)$/ ? tag : \
                parameters ~ ("[ *(]" tag "[,)]") ? "argument" : "term", rest)
            tags[count] = tag
        } else if (line ~ /^      +[^ ]/ && count && kinds[count] != "text") {
            sub(/^ */, "", line)
            texts[count] = texts[count] " " line
        } else {
            sub(/^ */, "", line)
            if (count && kinds[count] == "text") texts[count] = texts[count] " " line
            else put("text", line)
        }
    }
}

function describe(name, prototype,   i, n, p, parameters, argument, declared, text, out, about) {
    current = name
    parameters = prototype
    sub(/^[^(]*/, "", parameters)
    read_comment(name, parameters)
    out = "### " name "\n\n```text\n" prototype "\n```\n\n"
    for (i = 1; i <= count; i++) {
        if (kinds[i] == "text") out = out (i > 1 && kinds[i - 1] != "text" ? "\n" : "") flow(texts[i], "", "") \
            (kinds[i + 1] == "text" || i == count ? "" : "\n")
        if (kinds[i] == "item") out = out flow(texts[i], "* ", "  ")
        if (kinds[i] == "term") out = out flow(texts[i], "* `" tags[i] "`: ", "  ")
    }
    out = out (out ~ /\n\n$/ ? "" : "\n")
    # The arguments, in their order; what the comment leaves out stands in the comment of the section.
    sub(/^\(/, "", parameters)
    sub(/\);$/, "", parameters)
    if (match(parameters, /\(\*[a-z]+\)\([^)]*\)/)) # a function
        parameters = substr(parameters, RSTART + 2, index(substr(parameters, RSTART), ")") - 3) \
            substr(parameters, RSTART + RLENGTH)
    n = parameters == "void" ? 0 : split(parameters, p, /, */)
    for (i = 1; i <= n; i++) {
        argument = declared = p[i]
        sub(/.*[ *]/, "", argument)
        text = ""
        for (about = 1; about <= count; about++)
            if (kinds[about] == "argument" && tags[about] == argument) text = texts[about]
        if (text == "" && (declared in usual)) text = usual[declared]
        if (text == "" && (argument in usual)) text = usual[argument]
        if (argument == "n") sub(/`streams` or `array`/, prototype ~ /streams/ ? "`streams`" : "`array`", text)
        if (text == "") fail(name ": nothing on the argument " argument)
        out = out flow(text, "* `" argument "`: ", "  ")
    }
    out = out clause("Returns", prototype ~ /^cudaError_t/ ? "as [all functions](#all-functions)" : "")
    out = out clause("Streams", "")
    out = out clause("Threads", "any thread, at any time")
    out = out clause("Device", prototype ~ /^(cudaError_t|int)/ ? "does not wait for the device" : "")
    page[name] = out
}
function clause(tag, otherwise,   i, text) {
    text = otherwise
    for (i = 1; i <= count; i++) if (kinds[i] == tag) text = texts[i]
    if (tag == "Returns" && sub(/^also /, "", text)) text = "as [all functions](#all-functions); also " text
    return text == "" ? "" : flow(text, "* **" tag "**: ", "  ")
}

BEGIN {
    n_tasks = split(tasks, task, "\n")
    for (i = 1; i <= n_tasks; i++) {
        members = task[i]
        sub(/^[^:]*: */, "", members)
        sub(/:.*/, "", task[i])
        m[i] = split(members, member, " ")
        for (j = 1; j <= m[i]; j++) { place[i, j] = "galloc_" member[j]; known["galloc_" member[j]] = 1 }
    }
}

/^\/\* >>types/ { section = "types"; next }
/^\/\* >>api/ { section = "api"; next }
/^\/\* ====/ { section = "" }
/^#ifdef __cplusplus/ && section == "api" { section = "" }

# Types as they stand; the macros that count driver calls are of no use without the header.
section == "types" && /^#define GALLOC_DRIVER_CALLS|^#define GAI_/ { skipped = 1 }
section == "types" && skipped { skipped = /\\$/; next }
section == "types" { types = types $0 "\n" }

section == "api" && /^\/\*/ { lines = 0; inside = 1; sub(/^\/\*/, "  ") }
section == "api" && inside {
    last = sub(/ \*\/$/, "")
    comment[++lines] = $0
    if (last) {
        inside = 0
        if (!general) { # the comment of the section
            general = 1
            for (i = 1; i <= lines; i++) {
                if (comment[i] ~ /^   Arguments /) { arguments = i; break }
            }
            for (i = arguments + 1; i <= lines; i++) {
                line = comment[i]
                sub(/^ */, "", line)
                if (!match(line, /  +/)) { fail("an argument without a text: " line); continue }
                text = substr(line, RSTART + RLENGTH)
                m0 = split(substr(line, 1, RSTART - 1), listed, /, */)
                for (j = 1; j <= m0; j++) usual[listed[j]] = text
            }
            lines = arguments - 1
            read_comment("", "")
            for (i = 1; i <= count; i++) if (kinds[i] != "text")
                all = all flow(texts[i], "* **" kinds[i] "**: ", "  ")
            lines = 0
        }
    }
    next
}
section == "api" && /^GALLOC_API/ {
    prototype = $0
    while (prototype !~ /;$/ && (getline line) > 0) { sub(/^ */, " ", line); prototype = prototype line }
    sub(/^GALLOC_API /, "", prototype)
    name = prototype
    match(name, /galloc_[a-z_]+\(/)
    name = substr(name, RSTART, RLENGTH - 1)
    if (!(name in known)) fail("no place for " name)
    if (!lines) fail("no comment before " name)
    describe(name, prototype)
    lines = 0
}

END {
    current = ""
    print "# Functions\n"
    print "<!-- Written by docs/api.sh from the comments of galloc.h: change those, then `make docs-api`. -->\n"
    print "The public functions of [galloc.h](../galloc.h) by task. Names of chapters in capitals (ON STREAMS) refer to"
    print "the manual at the top of the header. [Settings](settings.md) has the keys of `GALLOC_CONF`. Sizes are in"
    print "bytes.\n"
    for (i = 1; i <= n_tasks; i++) {
        line = ""
        for (j = 1; j <= m[i]; j++) line = line (j > 1 ? ", " : "") place[i, j]
        printf "%s", flow(line, "* " task[i] ":", "  ")
    }
    print "\n## All functions\n\nWhat holds unless a function says otherwise:\n"
    printf "%s", all
    for (i = 1; i <= n_tasks; i++) {
        print "\n## " task[i]
        for (j = 1; j <= m[i]; j++) {
            if (!(place[i, j] in page)) fail("galloc.h does not declare " place[i, j])
            printf "\n%s", page[place[i, j]]
        }
    }
    print "\n## Types\n\nAs they stand in the header.\n\n```text"
    gsub(/^\n+|\n+$/, "", types)
    print types
    print "```"
    exit failed
}
' galloc.h
