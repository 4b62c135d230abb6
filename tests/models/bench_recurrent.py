"""What is left to run of a prompt whose first tokens are cached, for models with recurrent layers: time beside count.

    python -m tests.models.bench_recurrent [--presets=NAME,...] [--batch=8] [--cached=4096] [--fresh=512] [--out=FILE]

Miss: nothing is cached. Exact: the prefix, from the snapshot behind it. Shifted: the rows of attention layers alone,
which is what could be taken from elsewhere at most; the refusal of shifted reuse is measured here, not asserted. Random
bfloat16 weights; the fastest of several runs, compilation aside. Without ``--presets``, small models.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import recurrent
from models.recurrent import RecurrentModel, empty_state, prefill, rewind, snapshot
from models.recurrent_cost import still_to_run
from tests.models.tiny_recurrent import GATED_DELTA, KDA, MAMBA2

RUNS = 4


def fastest(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, in turns, compilation aside."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + RUNS):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: min(values) for name, values in times.items()}


def measure(model: RecurrentModel, batch: int, cached: int, fresh: int) -> dict[str, float]:
    """Times of a miss and of both kinds of hit, and the operations counted for them."""
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(0, model.vocab_size, (batch, cached + fresh), np.int32))
    state = empty_state(model, batch, cached + fresh + recurrent.BLOCK)
    empty = snapshot(state)
    state = prefill(model, tokens[:, :cached], state)[1]
    behind = snapshot(state)
    logits = {}

    def run(name: str, start: Any, part: Any, reused: int = 0) -> Any:
        nonlocal state
        logits[name], state = prefill(model, part, rewind(state, start), reused=reused)
        return logits[name]

    times = fastest(
        {
            "miss": lambda: run("miss", empty, tokens),
            "exact": lambda: run("exact", behind, tokens[:, cached:]),
            "shifted": lambda: run("shifted", empty, tokens, cached),
        }
    )
    if not np.array_equal(logits["miss"], logits["exact"]):
        raise AssertionError("an exact prefix has other bits than a miss")
    work = still_to_run(model.family, model.config, cached, fresh)
    return {
        **{f"{name}_ms": value for name, value in times.items()},
        "miss_tflops": batch * work.miss / times["miss"] / 1e9,
        **{f"saved_time_{name}": 1 - times[name] / times["miss"] for name in ("exact", "shifted")},
        "saved_operations_exact": work.saved_exact,
        "saved_operations_shifted": work.saved_shifted,
        "snapshot_mb_a_sequence": sum(leaf.nbytes for leaf in jax.tree.leaves(behind.memories)) / batch / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default="", help="names of models.recurrent.presets(), by comma")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--fresh", type=int, default=512)
    parser.add_argument("--out", default="", help="a JSON file to write")
    arguments = parser.parse_args()
    sizes = (arguments.batch, arguments.cached, arguments.fresh)
    chosen: dict[str, Any] = {name: name for name in arguments.presets.split(",") if name}
    if not chosen:
        chosen, sizes = {fields["model_type"]: fields for fields in (MAMBA2, GATED_DELTA, KDA)}, (2, 1024, 512)
    rows: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "sizes": sizes}
    print(f"{rows['device']}, batch {sizes[0]}, {sizes[1]} tokens cached, {sizes[2]} fresh; JAX {jax.__version__}")
    for name, source in chosen.items():
        rows[name] = row = measure(recurrent.random_model(source, dtype=jnp.bfloat16), *sizes)
        print(
            f"{name:22} miss {row['miss_ms']:8.1f} ms ({row['miss_tflops']:.0f} TFLOP/s)  "
            f"exact {row['exact_ms']:7.1f} ms saves {row['saved_time_exact']:.1%} ({row['saved_operations_exact']:.1%} "
            f"counted)  shifted {row['shifted_ms']:8.1f} ms saves {row['saved_time_shifted']:.1%} "
            f"({row['saved_operations_shifted']:.1%} counted)  snapshot {row['snapshot_mb_a_sequence']:.1f} MB",
            flush=True,
        )
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
