#!/bin/sh
# venv.sh FOLDER - a virtual environment with what docs/requirements.txt names; says in one line what to do where that
# cannot be had. Environment: PYTHON (python3).

cd "$(dirname "$0")/.." || exit 1
folder=$1
mkdir -p "$(dirname "$folder")" || exit 1
log=$folder.log

fail() {
    echo "$1 (what went wrong is in $log)" >&2
    exit 1
}

{ "${PYTHON:-python3}" -m venv "$folder" || "${PYTHON:-python3}" -m venv --without-pip "$folder"; } >"$log" 2>&1 ||
    fail "make docs and make plots need python3 with its module venv. On Debian: apt install python3-venv"
"$folder/bin/python" -m pip install -q -r docs/requirements.txt >>"$log" 2>&1 ||
    fail "make docs and make plots need the packages of docs/requirements.txt: run them where pip reaches an index"
touch "$folder/ready"
rm -f "$log"
