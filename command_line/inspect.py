"""``irminsul inspect A B``: the chunk map of two prompts, in the terminal and as a page."""

import sys
from pathlib import Path

from absl import flags

from command_line.chunk_map import as_json, as_page, as_text, chunk_map
from command_line.command import DONE, Command, exactly, own_flags, print_json
from experiments.errors import InputError
from experiments.traffic.tokenization import Encoder, load_tokenizer
from models.pretrained import TOKENIZER


def _read(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompt {path}: cannot be read ({error}); give a text file") from error
    if not text:
        raise InputError(f"prompt {path}: is empty; give a text file")
    return text


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    names = exactly(arguments, "A B")
    tokenizer = load_tokenizer(values.tokenizer or str(TOKENIZER))
    first, second = (Encoder(tokenizer).piece(_read(name)) for name in names)
    found = chunk_map(first, second, values.policy)
    if values.html:
        labels = (Path(names[0]).name, Path(names[1]).name)
        try:
            Path(values.html).write_text(as_page(found, tokenizer, labels), encoding="utf-8")
        except OSError as error:
            raise InputError(f"html={values.html}: cannot be written ({error.strerror}); name another file") from error
    if values.json:
        print_json(as_json(found))
    else:
        print(as_text(found, tokenizer, colour=sys.stdout.isatty()))
    return DONE


def _flags() -> flags.FlagValues:
    values = own_flags()
    flags.DEFINE_string("html", "", "write the map as a page to this file", flag_values=values)
    flags.DEFINE_string("policy", "irminsul", "what to reuse", flag_values=values)
    named = "deepseek, stdlib, or the path of a tokenizer.json; that of the reference models if empty"
    flags.DEFINE_string("tokenizer", "", named, flag_values=values)
    return values


COMMAND = Command(
    "inspect",
    "where the tokens of one prompt are found in another, chunk by chunk",
    "A B [--html=FILE] [--policy=NAME] [--tokenizer=NAME] [--json]   (A, B: text files)",
    ("irminsul inspect before.txt after.txt --html=map.html", "irminsul inspect README.md CHANGELOG.md --json"),
    _run,
    _flags,
)
