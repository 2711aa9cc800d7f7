# held.awk - galloc.h with a check at the beginning of each function: that its caller holds the locks which the brackets
# in the comment above it name (INSIDE_HOLDS of inside.c). Lines keep their numbers.

function pool_of(signature) {
    if (signature ~ /galloc_pool \*pool[,)]/) return "pool"
    if (signature ~ /gai_job \*job[,)]/) return "job->pool"
    return ""
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
{ print }
