"""``irminsul census TRACE...``: what a person with logs wants to know first, on one page."""

from pathlib import Path

from absl import flags

from command_line.command import DONE, Command, own_flags, print_json
from experiments import census
from experiments.errors import InputError
from experiments.traffic.tokenization import Encoder, load_tokenizer


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    if not arguments:
        raise InputError("no trace is named; give files or folders (.jsonl, .json, .traj; .gz, .xz)")
    encoder = Encoder(load_tokenizer(values.tokenizer))
    taken, damage = census.take(arguments, encoder, transform=values.transform, limit=values.limit)
    result = taken.result()
    savings = taken.survey.savings["deepseek-v3"]
    result["flops_saved_fraction"] = savings.saved / savings.full
    source = f"{damage}; tokenizer {Path(values.tokenizer).name}"
    out = Path(values.out or "census")
    if values.out or not values.json:
        census.write(out, result, taken, source)
    if values.json:
        print_json(result)
        return DONE
    print(census.page(result, damage))
    print(f"{out}: census.html, census.md, turns.png" + (", breaks.png" if result["breaks"] else ""))
    return DONE


def _flags() -> flags.FlagValues:
    values = own_flags()
    flags.DEFINE_string("out", "", "folder of the page and its plots; census, or with --json none", flag_values=values)
    flags.DEFINE_string(
        "tokenizer", "deepseek", "deepseek, stdlib, or the path of a tokenizer.json", flag_values=values
    )
    edits = "what a client might do to the context, such as window:12"
    flags.DEFINE_string("transform", "none", edits, flag_values=values)
    flags.DEFINE_integer("limit", 0, "traces to read of each file; 0: all", lower_bound=0, flag_values=values)
    return values


COMMAND = Command(
    "census",
    "what reuse would bring to logged traffic, and what breaks its prefix cache",
    "TRACE... [--tokenizer=NAME] [--transform=NAME] [--out=DIR] [--json]",
    ("irminsul census traces.jsonl", "irminsul census logs/ --tokenizer=stdlib --transform=window:12 --json"),
    _run,
    _flags,
)
