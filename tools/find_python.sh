#!/bin/sh
# Prints the path of a Python whose version is at least LOW and, when given, below HIGH.
#   tools/find_python.sh 3.12          tools/find_python.sh 3.11 3.12
# Every candidate is run before it is believed: a shim may exist for a version that is not installed, and some
# distributions ship a Python without the parts that make a virtual environment.
set -u
low=$1
high=${2:-99.0}

check='
import sys
low, high = (tuple(int(n) for n in text.split(".")) for text in sys.argv[1:3])
if not low <= sys.version_info[:2] < high:
    sys.exit(1)
import ensurepip, venv
print(sys.executable)
'

candidates() {
    if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"; fi
    for name in "python$low" python3.12 python3.13 python3.14 python3 python; do echo "$name"; done
    for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.*/bin/python; do echo "$path"; done
    for folder in /usr/bin /usr/local/bin /opt/homebrew/bin; do
        for path in "$folder"/python3.*; do echo "$path"; done
    done
    if command -v uv >/dev/null 2>&1; then uv python find ">=$low,<$high" 2>/dev/null; fi
}

candidates | while read -r candidate; do
    # -I: a PYTHONPATH meant for another version must not decide.
    if found=$("$candidate" -I -c "$check" "$low" "$high" 2>/dev/null) && [ -n "$found" ]; then
        echo "$found"
        exit 10
    fi
done
[ $? -eq 10 ] && exit 0

range="Python $low or later"
[ $# -gt 1 ] && range="Python $low or later, below $high,"
echo "error: no $range with its venv module was found; install one, or set PYTHON to the path of its interpreter." >&2
exit 1
