"""``irminsul COMMAND ...``: finds the command and runs it. Its module is imported only then."""

import importlib
import os
import sys
from collections.abc import Sequence

# By name: the module and variable of the command, and what it is for.
COMMANDS = {
    "demo": ("command_line.studies:DEMO", "an agent session whose header changes every turn, served from the cache"),
    "inspect": ("command_line.inspect:COMMAND", "where the tokens of one prompt are found in another, chunk by chunk"),
    "census": ("command_line.census:COMMAND", "what reuse would bring to logged traffic"),
    "replay": ("command_line.studies:REPLAY", "logged or generated sessions under one or several policies"),
    "run": ("command_line.studies:RUN", "a study by name, with a report"),
    "compare": ("command_line.compare:COMMAND", "two runs side by side, with differences beyond noise marked"),
    "chat": ("command_line.chat:COMMAND", "talk with a small model over the content cache"),
    "serve": ("command_line.serve:COMMAND", "an OpenAI-compatible endpoint over the content cache"),
    "models": ("command_line.checkpoints:COMMAND", "list, plan, convert and check models"),
    "cache": ("command_line.stored_cache:COMMAND", "look into, verify, export and forget what a disk tier holds"),
    "doctor": ("command_line.doctor:COMMAND", "versions, devices, and which kernels can run here and why not"),
}  # fmt: skip


def usage() -> str:
    """The list of commands."""
    lines = [f"  {command:<10}{what}" for command, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: irminsul COMMAND ...", "", *lines, "", "irminsul COMMAND --help shows flags and examples"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    name = arguments[0]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"error: irminsul {name!r} is no command; name one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, variable = COMMANDS[name][0].split(":")
    try:
        code = getattr(importlib.import_module(module), variable).main(arguments[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
