#!/bin/sh
# nvcc.sh ARGUMENTS... - compiles CUDA C++ for the simulated device. Called as the host compiler would be, with .cu
# files among the arguments:
#
#     tests/sim/nvcc.sh -I. program.cu -o program
#
# Without -c it links the simulated device as well. sim_cuda.h says what of CUDA C++ there is.
# Environment: CXX, CC; SIM_OBJECTS (the device's objects, instead of compiling tests/sim).

here=$(dirname "$0")
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
link=1

# Each .cu file becomes a .cpp file in which launches are calls and lines keep their numbers.
for argument; do
    shift
    case $argument in
    -c | -S | -E | -fsyntax-only) link= ;;
    *.cu)
        [ -r "$argument" ] || { echo "nvcc.sh: $argument: no such file" >&2; exit 1; }
        copy=$work/$(basename "$argument" .cu).cpp
        {
            echo "#line 1 \"$argument\""
            sed -E 's/([A-Za-z_][A-Za-z_0-9:]*(<[^<>()]*>)?) *<<</sim::kernel<decltype(\1), \1>::on(/g
                s/>>> *\(/)(/g' "$argument"
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
