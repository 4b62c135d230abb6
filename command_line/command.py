"""What every sub-command shares: absl flags of its own, help with examples, errors in one sentence, exit codes."""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from experiments.errors import InputError

DONE, FOUND_WANTING, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = "exit codes: 0 done, 1 checked and found wanting, 2 bad input, 130 interrupted"
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Command:
    """A sub-command.

    Fields:
      name: as typed behind ``irminsul``.
      what: in one line.
      usage: its arguments, one line a form.
      examples: whole command lines.
      run: from positional arguments and flags to an exit code. Raises ``InputError`` for what a user can put right.
      flags: makes its flags, anew for every run; those of other commands are unknown to it.
      passes: how arguments begin that are handed to ``run`` as they are, behind the positional ones.
    """

    name: str
    what: str
    usage: str
    examples: tuple[str, ...]
    run: Callable[[list[str], flags.FlagValues], int]
    flags: Callable[[], flags.FlagValues]
    passes: str | None = None

    def help(self) -> str:
        """The text of ``--help``."""
        usage = "\n".join(f"  irminsul {self.name} {line}".rstrip() for line in self.usage.splitlines() or [""])
        parts = [f"irminsul {self.name}: {self.what}", f"usage:\n{usage}"]
        values = self.flags()
        lines = [_describe(values[name]) for name in sorted(values)]
        if lines:
            parts.append("flags:\n" + "\n".join(lines))
        parts.append("examples:\n" + "\n".join(f"  {line}" for line in self.examples))
        return "\n\n".join([*parts, EXIT_CODES])

    def main(self, arguments: Sequence[str]) -> int:
        """Parses, runs, and turns what goes wrong into a sentence and an exit code."""
        before = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
        if {"-h", "--help"} & set(before):
            print(self.help())
            return DONE
        passed = [text for text in arguments if self.passes is not None and text.startswith(self.passes)]
        values = self.flags()
        try:
            try:
                positional = values([self.name, *(text for text in arguments if text not in passed)])[1:]
            except flags.Error as error:
                raise InputError(f"{' '.join(str(error).split())}; see irminsul {self.name} --help") from error
            return self.run([*positional, *passed], values)
        except InputError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return INTERRUPTED


def own_flags(*, json_output: bool = True) -> flags.FlagValues:
    """Flags for one command, which may stand behind arguments; with ``--json``, unless it has no result to print."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    if json_output:
        flags.DEFINE_bool("json", False, "print the result as JSON and nothing else", flag_values=values)
    return values


def add_dtype(values: flags.FlagValues, what: str) -> None:
    """The flag ``--dtype``, of weights."""
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], what, flag_values=values)


def print_json(value: Any) -> None:
    """A result as JSON on standard output."""
    print(json.dumps(value, indent=1, ensure_ascii=False, default=str))


Action = Callable[[list[str], flags.FlagValues], int]


def take_action(arguments: Sequence[str], values: flags.FlagValues, actions: Mapping[str, Action]) -> int:
    """Runs what the first argument names, with the arguments behind it.

    Raises:
      InputError: if it names nothing there is.
    """
    if not arguments or arguments[0] not in actions:
        given = f"action {arguments[0]!r} is unknown" if arguments else "no action is named"
        raise InputError(f"{given}; name one of {', '.join(actions)}")
    return actions[arguments[0]](list(arguments[1:]), values)


def exactly(arguments: Sequence[str], names: str) -> list[str]:
    """The arguments, if there are as many as ``names``.

    Raises:
      InputError: if there are more or fewer.
    """
    if len(arguments) != len(names.split()):
        raise InputError(f"{len(arguments)} arguments are given where {names or 'none'} is expected; see --help")
    return list(arguments)


def _describe(flag: flags.Flag) -> str:
    value = "" if flag.boolean else f"={'' if flag.default in (None, '') else flag.default}"
    head = f"  --{flag.name}{value}"
    text = textwrap.wrap(" ".join(flag.help.split()), WIDTH - 26, break_long_words=False)
    return f"{head:<25} " + ("\n" + " " * 26).join(text)
