"""Does reuse of reuse drift? Sessions whose prompts move on by one message a turn behind a header that changes.

Each turn serves the header of that turn and the last messages of one running text. What a turn computed stands behind
rows that were themselves reused, is kept, and is reused by the next turns at yet other positions; no prompt is ever
computed in full. The next tokens of the text are forced behind the prompt, and their distributions compared with those
of full prefill of the same prompt. Each policy keeps caches of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, Float, Int32
from ml_collections import ConfigDict
from tqdm import tqdm

from experiments import report
from experiments.accuracy_plots import KINDS
from experiments.accuracy_report import word
from experiments.batch_serving import Asked, admitted, computed, few_sizes, serve, with_pages
from experiments.divergence import divergence
from experiments.names import listed
from experiments.passage_questions import mean_interval
from experiments.plots import STYLE
from experiments.reuse_policies import lane
from experiments.subjects import documents, subject
from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.policies import Policy
from irminsul.prefill import complete

HEADER = (24, 96)  # tokens of a turn's header
MOST_DOCUMENTS = 60


@dataclass(frozen=True)
class Session:
    """``prompts[turn]`` and the tokens of the text behind it."""

    prompts: tuple[Int32[np.ndarray, " T"], ...]
    behind: tuple[Int32[np.ndarray, " F"], ...]


def session(text: Int32[np.ndarray, " N"], bos: int | None, rng: np.random.Generator, config: ConfigDict) -> Session:
    """Turns over one stretch of ``text``: turn ``t`` shows messages ``t`` to ``t + config.messages``."""
    message, shown = config.message, config.messages
    begin = int(rng.integers(len(text) - (config.turns + shown) * message - config.scored))
    first = [] if bos is None else [bos]
    prompts, behind = [], []
    for turn in range(config.turns):
        at = int(rng.integers(len(text) - HEADER[1]))
        header = text[at : at + int(rng.integers(*HEADER))]
        start, stop = begin + turn * message, begin + (turn + shown) * message
        prompts.append(np.concatenate([first, header, text[start:stop]]).astype(np.int32))
        behind.append(text[stop : stop + config.scored])
    return Session(tuple(prompts), tuple(behind))


def asked_of(sessions: Sequence[Session], turn: int) -> list[Asked]:
    """What each session asks at a turn."""
    found = []
    for each in sessions:
        prompt, forced = each.prompts[turn], each.behind[turn]
        found.append(Asked(prompt, forced, np.arange(len(prompt) - 1, len(prompt) + len(forced) - 1, dtype=np.int32)))
    return found


def serve_and_keep(
    model: Any, caches: Sequence[ContentCache], asked: Sequence[Asked], policy: Policy
) -> tuple[list[Float[Array, "n V"]], list[ContentCache], list[dict[str, int]]]:
    """Logits at the kept tokens, the caches with what was computed for the prompts, and tokens by bin."""
    admissions = admitted(model, caches, asked, policy)
    kept = list(caches)
    logits: list[Any] = [None] * len(asked)
    for group in computed(model, admissions, asked):
        after = with_pages(group, [admissions[index].cache for index in group.indexes])
        for place, (index, cache) in enumerate(zip(group.indexes, after, strict=True)):
            logits[index] = group.logits[place]
            kept[index] = complete(cache, admissions[index].request)
    return logits, kept, [admission.request.plan.bins for admission in admissions]


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Plays the sessions under every policy.

    Raises:
      InputError: for a model or policy that does not exist.
    """
    if config.quick:
        config = ConfigDict({**config.to_dict(), "turns": 5, "sessions": 1, "messages": 4})
    policies = [lane(name) for name in listed(config.policies)]
    chosen = subject(config.model, config.dtype)
    text = np.concatenate([chosen.encode(document) for document in documents(config.text)[0][:MOST_DOCUMENTS]])
    rng = np.random.default_rng(config.seed)
    sessions = [session(text, chosen.bos, rng, config) for _ in range(config.sessions)]
    longest = HEADER[1] + 1 + config.messages * config.message
    cache_config = CacheConfig(
        num_pages=4 * longest // 64,
        max_prompt_tokens=longest,
        max_new_tokens=few_sizes(config.scored, 64),
        dtype=config.dtype,
    )
    empty = [new_cache(cache_config, chosen.model.row_format) for _ in sessions]
    caches = {each.name: empty for each in policies}
    rows: list[dict[str, Any]] = []
    with jax.default_matmul_precision("highest" if config.dtype == "float32" else None):
        for turn in tqdm(range(config.turns), desc="turns"):
            asked = asked_of(sessions, turn)
            reference = serve(chosen.model, empty, asked, lane("full").policy).logits
            for each in policies:
                logits, caches[each.name], bins = serve_and_keep(chosen.model, caches[each.name], asked, each.policy)
                found = np.asarray(divergence(jnp.stack(reference), jnp.stack(logits)))[:, : config.scored].mean(axis=1)
                rows += [
                    {"policy": each.name, "turn": turn, "session": index, "kl": float(kl), "bins": bins[index]}
                    for index, kl in enumerate(found)
                ]
    return describe(config, rows, chosen.note, out)


def describe(config: ConfigDict, rows: list[dict[str, Any]], note: str, out: Path) -> report.StudyResult:
    """Summary, table by stretches of turns, and plot; the first turn has nothing to reuse."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    kl = {name: np.array([row["kl"] for row in rows if row["policy"] == name]) for name in names}
    kl = {name: values.reshape(config.turns, config.sessions) for name, values in kl.items()}
    cuts = sorted({1, *np.linspace(1, config.turns, 5).astype(int).tolist()})
    spans = list(pairwise(cuts))
    summary: dict[str, float] = {}
    lines = []
    for name in names:
        means = [mean_interval(kl[name][begin:end].mean(axis=0).tolist()) for begin, end in spans]
        for when, (mean, *_) in (("first", means[0]), ("last", means[-1])):
            summary[f"kl_{when}_turns_{word(name)}"] = mean
        bins = [row["bins"] for row in rows if row["policy"] == name and row["turn"]]
        served = sum(each["exact"] + each["shifted"] for each in bins) / sum(sum(each.values()) for each in bins)
        summary[f"reused_{word(name)}"] = served
        lines.append((name, f"{served:.3f}", *(f"{mean:.2g} [{low:.2g}, {high:.2g}]" for mean, low, high in means)))
    steady = [name for name in names if name.startswith("irminsul")] or names
    first, last = (
        ", ".join(f"{name} {summary[f'kl_{when}_turns_{word(name)}']:.1g}" for name in steady[:2])
        for when in ("first", "last")
    )
    title = f"KL to full prefill in the first turns: {first}; in the last: {last}"
    _plot(kl, title, out / "drift.png")
    columns = ("policy", "reused", *(f"KL, turns {begin + 1} to {end}" for begin, end in spans))
    return {
        "title": title,
        "summary": summary,
        "rows": rows,
        "notes": [
            note,
            f"{config.sessions} sessions of {config.turns} turns; a turn shows {config.messages} messages of "
            f"{config.message} tokens of {config.text} text, and {config.scored} tokens behind it are scored. "
            "Intervals: 95 % over sessions.",
        ],
        "tables": [report.markdown_table(columns, lines)],
        "figures": ["drift.png"],
    }


def _plot(kl: dict[str, Float[np.ndarray, "turns sessions"]], title: str, path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
        for name, values in kl.items():
            colour = KINDS.get(name.split(":")[0], ("#555555", name))[0]
            axis.plot(
                np.arange(1, len(values)) + 1, np.maximum(values[1:].mean(axis=1), 1e-9), color=colour, label=name
            )
        axis.set_yscale("log")
        axis.set_xlabel("turn")
        axis.set_ylabel("KL to full prefill (nats)")
        axis.legend(frameon=False, fontsize=8)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left", fontweight="bold", wrap=True)
        figure.savefig(path)
        plt.close(figure)
