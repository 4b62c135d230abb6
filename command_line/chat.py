"""``irminsul chat``: a conversation over the content cache, with the cache's bins behind each answer."""

import sys
import time
from typing import Any, TextIO

from absl import flags

import models
from command_line.command import DONE, Command, own_flags
from experiments.chat import Conversation, conversation
from experiments.errors import InputError
from irminsul.engine import Response
from irminsul.policies import POLICIES
from models import smollm2

MODELS = (smollm2.MLA_NAME, smollm2.NAME)


def bins_line(bins: dict[str, int]) -> str:
    """Where the prompt's tokens came from, empty bins left out."""
    total = sum(bins.values())
    served = bins["exact"] + bins["shifted"]
    parts = ", ".join(f"{name} {count:,}" for name, count in bins.items() if count)
    return f"{served:,} of {total:,} prompt tokens from the cache ({parts})"


def talk(conversing: Conversation, lines: TextIO, **sampling: Any) -> int:
    """Answers line by line until an empty one; returns the exit code.

    A line that makes the conversation too long is told and changes nothing.
    """
    for line in lines:
        if not line.strip():
            break
        started = time.perf_counter()
        try:
            response = conversing.ask(line.strip(), lambda piece: print(piece, end="", flush=True), **sampling)
        except ValueError as error:
            print(f"[{error}]", flush=True)
            continue
        print(f"\n[{_account(response, time.perf_counter() - started)}]", flush=True)
    return DONE


def _account(response: Response, seconds: float) -> str:
    first = response.timings["ttft_ms"] / 1e3
    return f"{len(response.tokens)} tokens in {seconds:.1f} s, first after {first:.1f} s; {bins_line(response.bins)}"


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    if arguments:
        raise InputError(f"argument {arguments[0]!r} is not understood; type messages once the model is ready")
    try:
        model, tokenizer = models.load(values.model, "float32"), smollm2.load_tokenizer()
    except ModuleNotFoundError as error:
        raise InputError(str(error)) from error
    conversing = conversation(model, tokenizer, values.system, values.policy)
    print(f"{values.model}: type a message, an empty line ends", flush=True)
    return talk(conversing, sys.stdin, temperature=values.temperature, seed=values.seed)


def _flags() -> flags.FlagValues:
    values = own_flags(json_output=False)
    flags.DEFINE_enum("model", smollm2.MLA_NAME, MODELS, f"one of {', '.join(MODELS)}", flag_values=values)
    flags.DEFINE_string("system", "", "the system message; the model's own if empty", flag_values=values)
    flags.DEFINE_enum(
        "policy", "irminsul", sorted(POLICIES), "what to reuse: irminsul, prefix, full", flag_values=values
    )
    flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token", lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of sampling", lower_bound=0, flag_values=values)
    return values


COMMAND = Command(
    "chat",
    "talk with a small model over the content cache; needs the extra smollm2",
    "[--model=NAME] [--system=TEXT] [--temperature=0.7]",
    ("irminsul chat", 'irminsul chat --system="You are brief." --temperature=0.7 --seed=1'),
    _run,
    _flags,
)
