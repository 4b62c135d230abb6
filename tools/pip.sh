#!/bin/sh
# Installs into a virtual environment by uv where there is one, else by pip: tools/pip.sh FOLDER ARGUMENTS-OF-INSTALL...
set -eu
python=$1/bin/python
shift
if command -v uv >/dev/null 2>&1; then
    exec uv pip install --python "$python" "$@"
fi
# An environment made by uv has no pip.
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
exec "$python" -m pip install --quiet --disable-pip-version-check "$@"
