#!/bin/sh
# venv.sh FOLDER REQUIREMENTS COMMANDS - a virtual environment with the packages that the file REQUIREMENTS names. It
# says in one line what to do where that cannot be had; COMMANDS are those that need it. Environment: PYTHON (python3).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
folder=$1 requirements=$2 commands=$3
mkdir -p "$(dirname "$folder")" || exit 1
log=$folder.log

fail() {
    echo "$1 (what went wrong is in $log)" >&2
    exit 1
}

{ "${PYTHON:-python3}" -m venv "$folder" || "${PYTHON:-python3}" -m venv --without-pip "$folder"; } >"$log" 2>&1 ||
    fail "$commands need python3 with its module venv. On Debian: apt install python3-venv"
"$folder/bin/python" -m pip install -q -r "$requirements" >>"$log" 2>&1 ||
    fail "$commands need the packages of $requirements: run them where pip reaches an index"
touch "$folder/ready"
rm -f "$log"
