#!/bin/sh
# check_install.sh - `make install` into an empty folder; programs that find galloc there through pkg-config and CMake,
# or fetch it, compile and run; `make uninstall` leaves nothing. Environment: CC, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
work="$PWD/${BUILD:-build}/check_install with blanks" # as galloc's own path may have them

. tests/support/verdicts.sh
unset MAKEFLAGS MAKELEVEL

# A umask as that of a careful administrator, and files beside the adaptors that are not galloc's.
cache=examples/pytorch
cache=$cache/__pycache__
mkdir -p "$cache" && : >"$cache/of_a_test.pyc"
holds "install" sh -c 'umask 077; make -s install PREFIX=/opt/galloc "DESTDIR=$1"' sh "$work/stage"
rm -f "$cache/of_a_test.pyc"
rmdir "$cache" 2>/dev/null
prefix=$work/stage/opt/galloc
(cd "$prefix" && find . -type f ! -name 'libgalloc_*.so' | LC_ALL=C sort) >"$work/list" 2>&1
cat >"$work/expected" <<'END'
./include/galloc.h
./include/galloc.hpp
./share/cmake/galloc/gallocConfig.cmake
./share/cmake/galloc/gallocConfigVersion.cmake
./share/doc/galloc/LICENSE
./share/galloc/preload/README.md
./share/galloc/preload/galloc_preload.c
./share/galloc/python/README.md
./share/galloc/python/galloc.py
./share/galloc/python/galloc_cuda_core.py
./share/galloc/python/galloc_cupy.py
./share/galloc/python/galloc_numba.py
./share/galloc/python/galloc_python.c
./share/galloc/python/galloc_rmm.py
./share/galloc/pytorch/README.md
./share/galloc/pytorch/galloc_torch.c
./share/galloc/pytorch/galloc_torch.cpp
./share/galloc/pytorch/galloc_torch.py
./share/man/man3/galloc.3
./share/pkgconfig/galloc.pc
END
holds "the installed files are those of the list" diff "$work/expected" "$work/list"
holds "everybody can read them" sh -c '[ -z "$(find "$1" ! -perm -444)" ]' sh "$work/stage"
holds "no link in them leads nowhere" sh -c '
    for page in "$1"/share/galloc/*/README.md; do
        grep -o "](\.[^)#]*" "$page" | cut -c3- | while read -r to; do
            [ -e "${page%/*}/$to" ] || { echo "$page: $to"; exit 1; }
        done || exit 1
    done' sh "$prefix"
holds "the header is the same" cmp galloc.h "$prefix/include/galloc.h"
version=$(sed -n 's/^#define GALLOC_VERSION_STRING "\(.*\)"/\1/p' galloc.h)
for file in share/pkgconfig/galloc.pc share/cmake/galloc/gallocConfigVersion.cmake share/man/man3/galloc.3; do
    holds "$file has the version" grep -qF "$version" "$prefix/$file"
    holds "$file is filled in" sh -c '! grep -q @ "$1"' sh "$prefix/$file"
done
for heading in NAME DESCRIPTION "ON STREAMS" "ON RUNNING OUT" FUNCTIONS; do
    holds "the manual page has $heading" grep -q "^.SH $heading\$" "$prefix/share/man/man3/galloc.3"
done
holds "the manual page has each function" sh -c '
    sed -n "s/^GALLOC_API .*[ *]\(galloc_[a-z_]*\)(.*;\$/\1/p" galloc.h | sort -u >"$1"
    [ -s "$1" ] && while read -r name; do grep -q "$name(" "$2" || { echo "$name"; exit 1; }; done <"$1"' \
    sh "$work/names" "$prefix/share/man/man3/galloc.3"
missing() { # program, what is not tested
    command -v "$1" >/dev/null 2>&1 && return 1
    echo "skipped: $2: $1 is not found"
}

if ! missing groff "the form of the manual page"; then
    holds "the manual page is well formed" sh -c '[ -z "$(groff -man -Tutf8 -ww "$1" 2>&1 >/dev/null)" ]' sh \
        "$prefix/share/man/man3/galloc.3"
fi

runs() { # program
    "$1" >"$work/said" && grep '1 MiB on the GPU' "$work/said"
}

# The simulated device stands for the CUDA runtime.
device=$(tests/support/device.sh "$work/sim") || exit 1
mkdir -p "$work/cuda/lib" && ar rcs "$work/cuda/lib/libcudart.a" "$device"/*.o || exit 1

if ! missing pkg-config "a program through pkg-config"; then
    export PKG_CONFIG_PATH="$prefix/share/pkgconfig"
    flags=$(pkg-config --define-variable=prefix="$prefix" --cflags --libs galloc)
    holds "pkg-config knows the version" [ "$(pkg-config --modversion galloc)" = "$version" ]
    holds "a program through pkg-config" sh -c 'eval "\"\$1\" -std=c99 -isystem tests/sim/include \
        examples/cmake/uses_galloc.c examples/cmake/galloc.c \"-L\$2/cuda/lib\" $3 -lm -ldl \
        -o \"\$2/through_pkg_config\""' sh "$cc" "$work" "$flags"
    holds "it runs" runs "$work/through_pkg_config"
fi

# A path that a shell and sed could misread; one that says nothing in another folder is refused.
odd="$work/a path & |"
holds "install into an odd path" make -s install "PREFIX=$odd" DESTDIR=
if ! missing pkg-config "a program through pkg-config, odd path"; then
    holds "a program through pkg-config, odd path" sh -c '
        eval "\"$3\" -std=c99 -isystem tests/sim/include -c examples/cmake/uses_galloc.c -o \"$2/odd.o\" \
            $(PKG_CONFIG_PATH="$1/share/pkgconfig" pkg-config --cflags galloc)"' sh "$odd" "$work" "$cc"
fi
holds "uninstall from an odd path" make -s uninstall "PREFIX=$odd" DESTDIR=
holds "nothing is left there" sh -c '[ -z "$(find "$1" -type f)" ]' sh "$odd"
for target in install uninstall; do
    holds "$target refuses a relative path" sh -c '
        ! make -s "$1" PREFIX=build/relative DESTDIR= && ! [ -e build/relative ]' sh "$target"
done

# CMake's own search for the toolkit wants nvcc; a module of this name, found first, stands for it.
if ! missing cmake "programs through CMake"; then
    mkdir -p "$work/modules"
    cat >"$work/modules/FindCUDAToolkit.cmake" <<END
if(NOT TARGET CUDA::cudart)
  add_library(CUDA::cudart INTERFACE IMPORTED)
  set_target_properties(CUDA::cudart PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "$PWD/tests/sim/include"
    INTERFACE_LINK_LIBRARIES "$work/cuda/lib/libcudart.a;m;dl")
endif()
set(CUDAToolkit_FOUND TRUE)
END
    project() { # name, options
        name=$1
        shift
        holds "cmake: $name" cmake -S examples/cmake -B "$work/$name" "-DCMAKE_MODULE_PATH=$work/modules" \
            "-DCMAKE_C_COMPILER=$cc" "$@"
        holds "cmake builds: $name" cmake --build "$work/$name"
        holds "the program of $name" runs "$work/$name/uses_galloc"
    }
    project installed "-DCMAKE_PREFIX_PATH=$prefix"
    ln -s "$PWD" "$work/source"
    project fetched "-DGALLOC_FETCH=$work/source"
    # Two projects of one build may both add it, and either kind of package has the header for C++.
    if ! missing "${CXX:-g++}" "galloc.hpp through CMake"; then
        mkdir -p "$work/twice"
        printf '%s\n' '#define GALLOC_IMPLEMENTATION' '#include "galloc.hpp"' \
            'int main() { return galloc::make_unique<char>(1, nullptr) == nullptr; }' >"$work/twice/twice.cpp"
        printf '%s\n' 'cmake_minimum_required(VERSION 3.17)' 'project(twice LANGUAGES C CXX)' \
            "add_subdirectory(\"$work/source\" first)" "add_subdirectory(\"$work/source\" second)" \
            'add_executable(twice twice.cpp)' 'target_link_libraries(twice PRIVATE galloc::galloc)' \
            >"$work/twice/CMakeLists.txt"
        holds "cmake: galloc.hpp, twice" cmake -S "$work/twice" -B "$work/twice/build" \
            "-DCMAKE_MODULE_PATH=$work/modules" "-DCMAKE_C_COMPILER=$cc" "-DCMAKE_CXX_COMPILER=${CXX:-g++}"
        holds "cmake builds: galloc.hpp, twice" cmake --build "$work/twice/build"
    fi
    # A project of CUDA C++ alone has no compiler of C; without nvcc, one of no language stands for it.
    for how in "find_package(galloc REQUIRED)" "add_subdirectory(\"$work/source\" galloc)"; do
        rm -rf "$work/bare" && mkdir -p "$work/bare"
        printf 'cmake_minimum_required(VERSION 3.17)\nproject(bare LANGUAGES NONE)\n%s\n' "$how" \
            >"$work/bare/CMakeLists.txt"
        holds "cmake without a compiler of C: $how" cmake -S "$work/bare" -B "$work/bare/build" \
            "-DCMAKE_MODULE_PATH=$work/modules" "-DCMAKE_PREFIX_PATH=$prefix"
    done
    holds "cmake refuses another version" sh -c '
        cp -r examples/cmake "$1/later" && sed -i "s/galloc 0.1 REQUIRED/galloc 7.0 REQUIRED/" "$1/later/CMakeLists.txt"
        ! cmake -S "$1/later" -B "$1/later/build" "-DCMAKE_MODULE_PATH=$1/modules" "-DCMAKE_PREFIX_PATH=$2"' \
        sh "$work" "$prefix"
fi

: >"$prefix/share/doc/galloc/of_somebody_else"
holds "uninstall" make -s uninstall PREFIX=/opt/galloc "DESTDIR=$work/stage"
cp "$work/out" "$work/uninstalled"
holds "it says what and where" grep -qx "galloc is removed from $work/stage/opt/galloc: header.*" "$work/uninstalled"
holds "only what is not galloc's is left" sh -c '
    [ "$(find "$1" -type f)" = "$1/share/doc/galloc/of_somebody_else" ]' sh "$prefix"

count_verdicts
