#!/bin/sh
# Makes or brings up to date a virtual environment: tools/make_venv.sh FOLDER REQUIREMENTS LOW [HIGH]
# LOW <= Python version < HIGH. Uses uv where there is one, else venv and pip. What is installed already stays.
set -eu
folder=$1
requirements=$2
shift 2
here=$(dirname "$0")
python=$folder/bin/python

# A folder that came with a copy of the tree, or whose Python was removed since, is made anew.
if ! "$python" -c '
import sys
ranges = [tuple(int(n) for n in text.split(".")) for text in sys.argv[1:]]
sys.exit(not (ranges[0] <= sys.version_info[:2] and all(sys.version_info[:2] < high for high in ranges[1:])))
' "$@" 2>/dev/null; then
    if command -v uv >/dev/null 2>&1; then
        uv venv --quiet --clear --python ">=$1${2:+,<$2}" "$folder"
    else
        base=$("$here"/find_python.sh "$@")
        "$base" -m venv --clear "$folder"
    fi
fi

echo "installing $requirements into $folder" >&2
"$here"/pip.sh "$folder" --requirement "$requirements"
