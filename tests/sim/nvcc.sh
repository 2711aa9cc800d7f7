#!/bin/sh
# nvcc.sh ARGUMENTS... - compiles CUDA C++ for the simulated device. Called as the host compiler would be, with .cu
# files among the arguments:
#
#     tests/sim/nvcc.sh -I. program.cu -o program
#
# Without -c it links the simulated device as well. sim_cuda.h says what of CUDA C++ there is.
# Environment: CXX, CC; SIM_OBJECTS (the device's objects, instead of compiling tests/sim).

export LC_ALL=C # numbers have a point, whatever the locale
here=$(dirname "$0")
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
link=1 files=0

# Each .cu file becomes a .cpp file in which launches are calls and lines keep their numbers. What stands in strings,
# characters and comments stays as it is: it is kept aside, with a mark in its place, until the launches are done.
launches_to_calls() { # file
    LC_ALL=C awk '
    # The length of the string, character or comment that begins the text; 0: a quote between digits, as in 1\0470.
    function kept_length(begin) {
        if (begin == "\047" && code ~ /(^|[^A-Za-z_0-9])[0-9][A-Za-z_0-9.\047]*$/) return 0
        if (begin == "/*") return index(substr(text, 3), "*/") ? index(substr(text, 3), "*/") + 3 : length(text)
        if (begin == "\"" && code ~ /(^|[^A-Za-z_0-9])(u8|u|U|L)?R$/ && match(text, /^"[^ ()\\]*\(/)) {
            begin = ")" substr(text, 2, RLENGTH - 2) "\""
            return index(text, begin) ? index(text, begin) + length(begin) - 1 : length(text)
        }
        if (begin == "//") match(text, /^([^\\\n]|\\(.|\n))*/)
        else if (begin == "\"") match(text, /^"([^"\\\n]|\\(.|\n))*"?/)
        else match(text, /^\047([^\047\\\n]|\\(.|\n))*\047?/)
        return RLENGTH
    }
    { text = text $0 "\n" }
    BEGIN {
        blank = "([ \t\n]|\001[0-9]+\002)"
        trailing = blank "*$"
        words = "(((static|inline)" blank "+)|(__launch_bounds__" blank "*\\([^()]*\\)" blank "*))*"
        kernel_template = "template" blank "*<[^;{}()]*>" blank "*" words "__global__" blank "+" words \
            "void" blank "+" words "[A-Za-z_][A-Za-z_0-9]*" blank "*\\("
    }
    END {
        while (match(text, /["\047]|\/[\/*]/)) {
            code = code substr(text, 1, RSTART - 1)
            begin = substr(text, RSTART, RLENGTH)
            text = substr(text, RSTART)
            bytes = kept_length(begin)
            if (bytes) kept[++n] = substr(text, 1, bytes)
            code = code (bytes ? "\001" n "\002" : begin)
            text = substr(text, (bytes ? bytes : 1) + 1)
        }
        text = with_types(code text)
        while ((at = index(text, "<<<"))) {
            code = substr(text, 1, at - 1)
            text = substr(text, at + 3)
            name = name_before(code)
            end = name == "" ? 0 : launch_end(text)
            if (end) {
                gap = code
                sub(trailing, "", code)
                gap = substr(gap, length(code) + 1)
                code = substr(code, 1, length(code) - length(name)) launcher(name) gap
                printf "%s)", restored(code substr(text, 1, end - 1))
                text = substr(text, end + 3)
            } else {
                printf "%s<<<", restored(code)
            }
        }
        printf "%s", restored(text)
    }
    # The name of a kernel at the end of a text, perhaps with arguments of a template; "": there is none.
    function name_before(s,    i, depth, inner, c, name) {
        sub(trailing, "", s)
        i = length(s)
        if (substr(s, i) == ">")
            for (depth = 1; depth && --i;) {
                c = substr(s, i, 1)
                inner += (c == ")") - (c == "(")
                if (!inner) depth += (c == ">") - (c == "<")
            }
        name = substr(s, i + (i < length(s) ? 0 : 1))
        s = substr(s, 1, i - (i < length(s) ? 1 : 0))
        return match(s, /[A-Za-z_][A-Za-z_0-9:]*$/) ? substr(s, RSTART) name : ""
    }
    # Where the >>> of a launch stands: behind whole parentheses, and before one. 0: nowhere
    function launch_end(s,    i, depth, c) {
        for (i = 1; i <= length(s) && depth >= 0; i++) {
            c = substr(s, i, 1)
            if (c ~ /[([{]/) depth++
            if (c ~ /[])}]/) depth--
            if (c == ";" && !depth) return 0
            if (c == ">" && !depth && substr(s, i, 3) == ">>>" && substr(s, i + 3, 200) ~ ("^" blank "*\\(")) return i
        }
        return 0
    }
    # Before each kernel template stands a function that takes the same arguments and returns a pointer to a function
    # of the same parameters: its type is that of the kernel which a launch means.
    function with_types(s,    done, head, name, list, type, depth, i) {
        while (match(s, kernel_template)) {
            done = done substr(s, 1, RSTART - 1)
            head = substr(s, RSTART, RLENGTH)
            s = substr(s, RSTART + RLENGTH)
            for (i = depth = 1; depth && i <= length(s); i++) {
                if (substr(s, i, 1) == "(") depth++
                if (substr(s, i, 1) == ")") depth--
            }
            list = "(" substr(s, 1, i - 1)
            type = head
            gsub(/\001[0-9]+\002|\n/, " ", type)
            gsub(/\001[0-9]+\002|\n/, " ", list)
            sub(/[ \t]*\($/, "", type)
            name = type
            sub(/.*[^A-Za-z_0-9]/, "", name)
            is_template[name] = 1
            sub(/>[ \t]*((static|inline)[ \t]+|__launch_bounds__[ \t]*\([^()]*\)[ \t]*)*__global__.*/, ">", type)
            type = type " auto sim_types_of_" name list " -> void (*)" list ";"
            done = done type " " head
        }
        return done s
    }
    # What stands before the arguments of a launch, up to the one of its grid.
    function launcher(name,    own, scope) {
        own = name
        sub(/<.*/, "", own)
        sub(/.*:/, "", own)
        if (!(own in is_template)) return "sim::launched<decltype(" name "), " name ">::on("
        scope = name
        sub(own "(<.*)?$", "", scope)
        return "sim::deduced([](auto... sim_a) { return sim::launched<std::remove_pointer_t<decltype(" scope \
            "sim_types_of_" substr(name, length(scope) + 1) "(sim_a...))>, " name ">(); }).on("
    }
    function restored(s,    done) {
        while (match(s, /\001[0-9]+\002/)) {
            done = done substr(s, 1, RSTART - 1) kept[substr(s, RSTART + 1, RLENGTH - 2)]
            s = substr(s, RSTART + RLENGTH)
        }
        return done s
    }' "$1"
}

for argument; do
    shift
    case $argument in
    -c | -S | -E | -fsyntax-only) link= ;;
    *.cu)
        [ -r "$argument" ] || { echo "nvcc.sh: $argument: no such file" >&2; exit 1; }
        files=$((files + 1))
        mkdir "$work/$files" || exit 1
        copy=$work/$files/$(basename "$argument" .cu).cpp
        {
            echo "#line 1 \"$argument\""
            launches_to_calls "$argument"
        } >"$copy"
        set -- "$@" "-I$(dirname "$argument")"
        argument=$copy
        ;;
    esac
    set -- "$@" "$argument"
done

if [ "$link" ] && [ -z "$SIM_OBJECTS" ]; then
    for file in "$here"/*.c; do
        SIM_OBJECTS="$SIM_OBJECTS $work/$(basename "$file" .c).o"
        "${CC:-gcc}" -O1 -w -isystem "$here/include" -c "$file" -o "${SIM_OBJECTS##* }" || exit 1
    done
fi
# shellcheck disable=SC2086 # words
"${CXX:-g++}" -isystem "$here" -isystem "$here/include" -include sim_cuda.h "$@" \
    ${link:+$SIM_OBJECTS -lpthread -lm -ldl}
