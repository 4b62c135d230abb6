"""Writes docs/reference/command-line.md: the help of every command, as it is printed.

python -m tools.write_command_reference            write it
python -m tools.write_command_reference --check    fail when the page and the commands differ
"""

import argparse
import importlib
import pathlib
import sys

from command_line.main import COMMANDS, usage

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "reference" / "command-line.md"


def text() -> str:
    """The page."""
    parts = ["# The command line", f"```text\n{usage()}\n```"]
    for name, (place, _) in COMMANDS.items():
        module, variable = place.split(":")
        parts.append(f"## {name}\n\n```text\n{getattr(importlib.import_module(module), variable).help()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when the page and the commands differ")
    if parser.parse_args().check:
        if PAGE.read_text() != text():
            print(
                f"{PAGE.name} differs from the commands; run python -m tools.write_command_reference", file=sys.stderr
            )
            return 1
        return 0
    PAGE.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
