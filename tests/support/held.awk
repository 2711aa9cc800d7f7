# held.awk - galloc.h with checks of its locks, for inside.c. Lines keep their numbers. Checked are:
# * the locks that the brackets in the comment above a function name: its caller holds them (INSIDE_HOLDS);
# * the members of galloc_pool and gai_process that stand in the group of a lock: who reads or writes one holds the lock
#   (INSIDE_GUARDED). Not those whose own comment says that they are atomic or read without it, and no atomic access.
# A descriptor that is given back to its slab is filled (INSIDE_GIVEN), so that whoever reads it still is noticed.

function pool_of(signature) {
    if (signature ~ /galloc_pool \*pool[,)]/) return "pool"
    if (signature ~ /gai_job \*job[,)]/) return "job->pool"
    return ""
}

# The lock of a group, from the comment at its head.
function group_of(comment) {
    if (comment ~ /Guarded by the budget lock|The budget lock guards/) return "BUDGET_LOCK"
    if (comment ~ /Guarded by `paging` and `lock`/) return "PAGING_OR_LOCK"
    if (comment ~ /Guarded by `paging`/) return "PAGING"
    if (comment ~ /`lock` guards all groups/) return "LOCK"
    if (comment ~ /The global lock guards/) return "GLOBAL_LOCK"
    if (comment ~ /The context lock guards/) return "CONTEXT_LOCK"
    if (comment ~ /The lock of tags guards/) return "TAGS_LOCK"
    if (comment ~ /The lock of the clock guards/) return "CLOCK_LOCK"
    if (comment ~ /The log lock guards/) return "LOG_LOCK"
    if (comment ~ /Read by every call|Read without a lock|Set when the pool begins|Kept when/) return "NONE"
    return ""
}

# Notes the members that a line of one of the two structs declares.
function declare(line,   own, names, n, i) {
    own = line
    if (own ~ / (broken|retires|budgets\[.*|block_map)[,;]/) return # see their longer comments; an element's lock
    if (own ~ /without a lock|atomic|latch alone|global lock|written with|set when it begins/) return
    gsub(/\/\*.*/, "", own)
    if (own !~ /[;,]/ || own ~ /\(/ || group == "" || group == "NONE" || nested) return
    gsub(/\[[^]]*\]/, "", own)
    n = split(own, names, /[,;]/)
    for (i = 1; i <= n; i++)
        if (match(names[i], /[a-z_]+ *$/)) {
            sub(/ *$/, "", names[i])
            guard[prefix substr(names[i], RSTART)] = group
        }
}

# Puts a check around each guarded member in a line of code.
function guarded(line,   done, name, before, lock) {
    done = ""
    while (match(line, /(pool->|gai_process\.)[a-z_]+/)) {
        before = substr(line, 1, RSTART - 1)
        name = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH)
        lock = guard[name]
        base = ""
        if (name ~ /^pool->/ && match(before, /[a-z_]+->$/)) {
            base = substr(before, RSTART)
            before = substr(before, 1, RSTART - 1)
        }
        if (lock == "" || before ~ /[a-z_.]$/ || before ~ /"[^"]*$/ || line ~ /^\.driver/ ||
            before ~ /gai_(count|load|next|set|store|swap)[a-z_]*\(&$/)
            done = done before base name
        else {
            member = name
            sub(/.*(->|\.)/, "", member)
            owner = name ~ /^pool->/ ? base "pool" : "NULL"
            done = done before "INSIDE_GUARDED(" owner ", INSIDE_" lock ", \"" member "\", " base name ")"
        }
    }
    return done line
}

/^struct galloc_pool \{/ { inside = 1; prefix = "pool->"; group = "" }
/^static struct \{/ { inside = 1; prefix = "gai_process."; group = "" }
inside {
    if (/^    \/\*/ && group_of($0) != "") group = group_of($0)
    else if (/^    \/\*/ && prefix == "gai_process.") group = ""
    if (/^    struct \{/) nested = 1
    if (!nested) declare($0)
    if (/^    \}/) {
        nested = 0
        declare($0)
    }
    if (/^\}/) inside = 0
    print
    next
}

/^\/\*/ { comment = ""; open = 1 }
open { comment = comment $0 }
open { if (/\*\//) open = 0; print; next }
/^$/ { comment = signature = "" }
/^(static|GAI_|[a-z_]+ \*?gai_)/ || signature { signature = signature $0 }
/^\{/ && signature {
    pool = pool_of(signature)
    if (match(comment, /\[(paging, lock|paging|lock|no lock|lock, latches|global lock|budget lock|context lock)\]/)) {
        held = substr(comment, RSTART + 1, RLENGTH - 2)
        gsub(/ lock/, "_lock", held)
        sub(/,_/, "_and_", held)
        sub(/, /, "_and_", held)
        if (pool || held ~ /^(no|global|budget|context)_lock$/)
            sub(/^\{/, "{ INSIDE_HOLDS(" (pool ? pool : "NULL") ", INSIDE_" toupper(held) ");")
    }
    comment = signature = ""
}
/^    slab->available\+\+;$/ { $0 = $0 " INSIDE_GIVEN(slab, descriptor);" }
/^ / { $0 = guarded($0) }
{ print }
