"""Executes notebooks as plain Python, one process each: python tools/run_notebooks.py NOTEBOOK.ipynb...

The code cells run in order in one namespace with a non-interactive plot back end. Needs no notebook packages, and so
refuses cells that only a notebook server understands (`%magic`, `!shell`).
"""

import json
import os
import pathlib
import subprocess
import sys
import time


def execute(path: pathlib.Path) -> None:
    """Runs the code cells of one notebook in this process; an error names the notebook and the cell."""
    namespace: dict = {"__name__": "__main__"}
    cells = json.loads(path.read_text())["cells"]
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"{path} cell {index}", "exec"), namespace)


def main() -> int:
    """Runs each notebook named on the command line in a process of its own; 1 if any failed."""
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    failed = 0
    for name in sys.argv[1:]:
        start = time.monotonic()
        path = pathlib.Path(name).resolve()
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--one", path.name]
        code = subprocess.run(command, env=environment, cwd=path.parent, check=False).returncode
        print(f"{name}: {'ok' if code == 0 else 'FAILED'} in {time.monotonic() - start:.1f} s", flush=True)
        failed += code != 0
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        execute(pathlib.Path(sys.argv[2]))
    else:
        sys.exit(main())
