"""The command ``irminsul``: each of its words is a function from arguments to an exit code."""

import importlib
import sys

COMMANDS = {
    "chat": ("experiments.chat", "talk with a small model over the content cache"),
    "census": ("experiments.census", "what reuse would bring to logged traffic, and what breaks its prefix cache"),
}


def main() -> int:
    """Runs ``irminsul COMMAND ...``; returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        lines = [f"  {command:<10} {what}" for command, (_, what) in COMMANDS.items()]
        print(
            "usage: irminsul COMMAND ...\n\n" + "\n".join(lines),
            file=sys.stdout if name in ("-h", "--help") else sys.stderr,
        )
        return 0 if name in ("-h", "--help") else 2
    return importlib.import_module(COMMANDS[name][0]).main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
