#!/bin/sh
# Checks what `make venv` needs from the machine, and says what to do about what is missing.
# Usage: toolchain.sh PYTHON CXX VENV
python=$1 cxx=$2 venv=$3

fail() {
    printf '\n%s\n%s\n\n' "$1" "$2" >&2
    exit 1
}

for folder in "$PWD" "$venv"; do
    case $folder in
        *[!A-Za-z0-9_./+,@=~-]*)
            fail "The path has a space or a special character: $folder" \
                "Building Horovod does not work there. Choose a path of letters, digits and . _ + , @ = ~ -" ;;
    esac
done

if [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' is missing or cannot make virtual environments (modules venv and ensurepip)." \
            "Debian, Ubuntu: apt-get install python3 python3-venv. Another Python: make PYTHON=python3.12"
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$python' is $("$python" --version 2>&1); Python 3.10 or newer is needed." \
        "Name another one: make PYTHON=python3.12 (and remove $venv if it was made with the old one)"

"$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    fail "'$python' comes without its C headers (Python.h)." \
        "Debian, Ubuntu: apt-get install python3-dev. RHEL: dnf install python3-devel"

echo 'int main() { if constexpr (sizeof(char) == 1) return 0; }' |
    $cxx -std=c++17 -x c++ -fsyntax-only - 2>/dev/null ||
    fail "'$cxx' is missing or is not a compiler for C++17." \
        "Debian, Ubuntu: apt-get install g++. Cluster: module load gcc. Another compiler: make CXX=g++-12"
