"""The traffic of a study: which requests, under which transform and tokenizer, as the configuration says."""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict
from tqdm import tqdm

from experiments.traffic.generator import SessionShape, generate_session
from experiments.traffic.readers import ReadReport, read_requests
from experiments.traffic.session import Request, limit_traces
from experiments.traffic.tokenization import Encoder, load_tokenizer
from experiments.traffic.transforms import get_transform
from models.pretrained import FOLDER, TOKENIZER


@dataclass(frozen=True)
class Traffic:
    """The requests to replay, read again on every call of ``requests``, and what a first pass found."""

    requests: Callable[[], Iterator[Request]]
    encoder: Encoder
    count: int
    longest_prompt: int
    longest_response: int
    description: str


def read_traffic(config: ConfigDict) -> Traffic:
    """Opens the traffic and passes over it once, to know its size and its longest prompt."""
    transform = get_transform(config.transform)
    encoder = Encoder(load_tokenizer(_tokenizer_name(config)))
    damage = ReadReport()
    limit = 1 if config.quick and not config.limit_traces else config.limit_traces
    turns = 4 if config.quick else sys.maxsize
    if config.traces:
        source = Path(config.traces).name
        logged = lambda: read_requests(config.traces, damage)  # noqa: E731
    else:
        source = f"generated sessions of scenario {config.scenario}"
        shape = SessionShape(
            config.scenario, config.turns, config.prompt_tokens, tuple(config.varying_tokens), config.seed
        )
        sessions = [generate_session(shape, encoder, session) for session in range(config.sessions)]
        logged = lambda: itertools.chain.from_iterable(sessions)  # noqa: E731

    def requests() -> Iterator[Request]:
        return transform(request for request in limit_traces(logged(), limit) if request.turn < turns)

    sizes = [
        (len(encoder.prompt(request)), len(encoder.response(request)))
        for request in tqdm(requests(), desc="tokenising", unit=" requests", leave=False, file=sys.stderr)
    ]
    if damage.skipped:
        print(f"{source}: {damage}", file=sys.stderr)
    prompts, responses = zip(*sizes, strict=True)
    description = f"{source}, transform {config.transform}, tokenizer {_tokenizer_label(_tokenizer_name(config))}"
    if damage.skipped:
        description += f" ({damage})"
    return Traffic(requests, encoder, len(sizes), max(prompts), max(responses), description)


def pretrained(model: str) -> Path | None:
    """The folder of a checkpoint, by name or path; None for models that are made up."""
    for path in (FOLDER / model, Path(model)):
        if model and (path / "config.json").is_file():
            return path
    return None


def _tokenizer_name(config: ConfigDict) -> str:
    if config.tokenizer != "auto":
        return config.tokenizer
    checkpoint = pretrained(config.model)
    if checkpoint is not None and (checkpoint / "tokenizer.json").is_file():
        return str(checkpoint)
    if config.traces and not config.model.startswith("irminsul-mini"):
        return "deepseek"
    return str(TOKENIZER.parent) if TOKENIZER.is_file() else "stdlib"


def _tokenizer_label(name: str) -> str:
    """The name without the path it may be."""
    path = Path(name)
    return path.parent.name if path.name == "tokenizer.json" else path.name
