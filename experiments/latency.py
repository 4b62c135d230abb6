"""Time to first token at production shape: what of it a hit saves, and what a hit costs.

Ideal is the time of full prefill times the operations of the computed tokens, at their positions, over those of all:
what is left of the distance is planning, reading weights for few tokens, projecting reused rows up, and padding.
Weights are random, which changes nothing about time. Compilation happens ahead of every clock and is reported apart.
"""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments import ceilings, latency_plots, report
from experiments.decode_speed import decode_ms
from experiments.energy_meter import Meter, meter
from experiments.errors import InputError
from experiments.names import listed
from experiments.reuse_prompts import FULL, HEADER, HIT, Placement, Served, Server, compose
from experiments.work import Work, work_of
from irminsul.cache_key import request_key
from irminsul.compilation import count_compilations
from irminsul.content import read_content
from irminsul.plan import plan_prompt
from irminsul.policies import Policy
from models.random_weights import random_model_on_device
from pallas_kernels.rotary import rotate

WINDOW_SECONDS = 2.2  # of energy

# A small shape with every part of the large one.
QUICK_SHAPE = {
    "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1009,
}  # fmt: skip
QUICK = {
    "dtype": "float32", "pool_tokens": 8192, "lengths": "1024", "fractions": "0.5,0.8", "span": 256,
    "hit_spans": "128,256", "repeats": 2, "decode_batch": 2, "decode_context": 128, "matmul": 512,
}  # fmt: skip


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Times prompts of every length and share, decoding, and the parts of a hit.

    Raises:
      InputError: for a setting that cannot be followed.
    """
    settings = {**config.to_dict(), **(QUICK if config.quick else {})}
    lengths = [int(text) for text in listed(settings["lengths"])]
    if not lengths or min(lengths) < 4 * HEADER or settings["repeats"] < 1:
        raise InputError(f"lengths={config.lengths!r} and repeats={config.repeats}: give lengths from {4 * HEADER} on")
    with count_compilations() as compiled:
        server, seconds = _warm_server(config, settings, max(lengths))
    start = {"init_seconds": seconds, "compile_seconds": compiled.seconds, "programs": compiled.programs}
    print(f"ready: {start}", flush=True)
    work = work_of(server.model, jnp.dtype(settings["dtype"]).itemsize)
    peak = ceilings.matmul_flops(settings["matmul"], 0.1 if config.quick else 1.0)
    copy = ceilings.copy_bytes(1 << (24 if config.quick else 31), 0.1 if config.quick else 0.5)
    rng = np.random.default_rng(config.seed)
    rows: list[dict[str, Any]] = []
    counter = meter()
    if counter is not None:
        counter.measure_idle(2.0)
    with count_compilations() as later:
        _fill(server, rng, settings, max(lengths))
        for length in lengths:
            rows += _length_rows(server, work, rng, settings, length, counter)
            print(*(_line(row) for row in rows if row["length"] == length), sep="\n", flush=True)
    hit = _cost_of_a_hit(server, rng, settings, min(lengths))
    decoding = _decoding(server, work, copy, settings)
    summary = _summary(rows, work, peak, settings) | hit | decoding | start
    summary |= {"matmul_tflops": peak / 1e12, "copy_gb_per_second": copy / 1e9, "compiled_while_timing": later.programs}
    title = _title(summary, config.preset, lengths)
    latency_plots.plot_fractions(rows, title, out / "fractions.png")
    return {
        "title": title,
        "summary": summary,
        "rows": rows,
        "notes": [
            f"{config.preset}{' cut down' if config.quick else ''}, random weights, {settings['dtype']}, a pool of "
            f"{settings['pool_tokens']:,} tokens of which {config.filled:.0%} hold other prompts. Every repeat "
            "brings new tokens; medians, with the least and the largest time.",
            "Ideal is full prefill times the operations of the computed tokens at their positions over those of all.",
        ],
        "tables": [_table(rows)],
        "figures": ["fractions.png"],
    }


def _warm_server(config: ConfigDict, settings: dict[str, Any], longest: int) -> tuple[Server, float]:
    """A server whose programs are compiled, and the seconds that drawing the weights took."""
    started = time.perf_counter()
    shape = QUICK_SHAPE if config.quick else {}
    model = random_model_on_device(config.preset, config.seed, jnp.dtype(settings["dtype"]), **shape)
    jax.block_until_ready(model.params)
    seconds = time.perf_counter() - started
    server = Server.create(
        model, pool_tokens=settings["pool_tokens"], max_prompt_tokens=longest, dtype=settings["dtype"]
    )
    server.sizes = tuple(int(text) for text in listed(settings["blocks"]))
    server.serve(np.arange(7, dtype=np.int32), FULL)
    server.serve(np.arange(11, dtype=np.int32), HIT)
    server.serve_in_a_row([np.arange(13, dtype=np.int32)], HIT)
    gc.collect()
    gc.freeze()  # as servers do: a collection that walks through what compiling left takes longer than planning
    return server, seconds


def _new_tokens(rng: np.random.Generator, server: Server, count: int) -> np.ndarray:
    return rng.integers(0, server.model.vocab_size, count, dtype=np.int32)


def _fill(server: Server, rng: np.random.Generator, settings: dict[str, Any], longest: int) -> None:
    """Other prompts in the pool, so that registry and tree are as large as they get."""
    for _ in range(int(settings["filled"] * settings["pool_tokens"] / longest)):
        server.keep(_new_tokens(rng, server, longest))


def _length_rows(
    server: Server,
    work: Work,
    rng: np.random.Generator,
    settings: dict[str, Any],
    length: int,
    counter: Meter | None,
) -> list[dict[str, Any]]:
    """Full prefill, then every share and placement, then an exact prefix; the energy of a few where it is counted."""
    source = _new_tokens(rng, server, length)
    server.keep(source)
    body = source[HEADER:]
    vocab, repeats = server.model.vocab_size, settings["repeats"]
    full = [server.serve(_new_tokens(rng, server, length), FULL) for _ in range(repeats)]
    rows = [_row(full, work, length, 0.0, "full", _median(full))]
    cases: list[tuple[float, Placement]] = [(float(text), "spread") for text in listed(settings["fractions"])]
    for text in listed(settings["edge_fractions"]):
        cases += [(float(text), "head"), (float(text), "tail")]
    for fraction, placement in cases:
        reused = min(round(fraction * length), length - 2 * HEADER)
        served = [
            server.serve(compose(rng, vocab, length, reused, placement, body, settings["span"])) for _ in range(repeats)
        ]
        rows.append(_row(served, work, length, fraction, placement, _median(full)))
    reused = round(0.8 * length)
    exact = [
        server.serve(np.concatenate([source[:reused], _new_tokens(rng, server, length - reused)]))
        for _ in range(repeats)
    ]
    rows.append(_row(exact, work, length, 0.8, "exact", _median(full)))
    if counter is None:
        return rows
    prompts = {
        ("full", 0.0): lambda: _new_tokens(rng, server, length),
        ("spread", 0.8): lambda: compose(rng, vocab, length, reused, "spread", body, settings["span"]),
    }
    for row in rows:
        make = prompts.get((row["placement"], row["fraction"]))
        if make is not None:
            policy = FULL if row["placement"] == "full" else HIT
            reading = counter.measure(partial(_serve_queue, server, make, policy), WINDOW_SECONDS, 1)[0]
            row |= {"joules": reading.joules, "net_joules": reading.net_joules}
    return rows


def _serve_queue(server: Server, make: Callable[[], np.ndarray], policy: Policy, seconds: float) -> tuple[Any, int]:
    logits, _, times = server.serve_queue(lambda: [make()], policy, seconds)
    return logits, times


def _median(served: list[Served]) -> float:
    return statistics.median(one.ttft_ms for one in served)


def _row(
    served: list[Served], work: Work, length: int, fraction: float, placement: str, full_ms: float
) -> dict[str, Any]:
    everything = work.flops(np.arange(length))
    ideal = statistics.median(full_ms * work.flops(one.computed) / everything for one in served)
    ttft = _median(served)
    times = [one.ttft_ms for one in served]
    return {
        "length": length,
        "fraction": fraction,
        "placement": placement,
        "computed": statistics.median(len(one.computed) for one in served),
        "reused": statistics.median(one.bins["exact"] + one.bins["shifted"] for one in served),
        "ttft_ms": ttft,
        "ttft_least_ms": min(times),
        "ttft_largest_ms": max(times),
        "plan_ms": statistics.median(one.plan_ms for one in served),
        "prefill_ms": statistics.median(one.prefill_ms for one in served),
        "ideal_ms": ideal,
        "over_ideal": ttft / ideal,
        "tokens_per_second": 1e3 * length / ttft,
    }


def _cost_of_a_hit(server: Server, rng: np.random.Generator, settings: dict[str, Any], length: int) -> dict[str, float]:
    """What reuse adds on the host, by tokens and by spans, what turning adds on the device, and the length of a span
    from which it is cheaper than computing."""
    source = _new_tokens(rng, server, length)
    server.keep(source)
    model, cache = server.model, server.cache
    key = request_key(cache, model, "default", "", True, "fast", "private")
    owner = cache.namespaces.index(key)
    found, times, reading = [], [], []
    for span in (int(text) for text in listed(settings["hit_spans"])):
        for _ in range(settings["repeats"]):
            prompt = compose(rng, model.vocab_size, length, length // 2, "spread", source[HEADER:], span)
            started = time.perf_counter()
            content = read_content(prompt, cache.config.chunking, key)
            read = time.perf_counter()
            plan = plan_prompt(
                cache.tree, cache.registry, content, owner, HIT, cache.config.chunking.anchor_window,
                cache.config.planned_entries,
            )  # fmt: skip
            planned = time.perf_counter()
            served = server.serve(prompt)
            reading.append(1e3 * (read - started))
            found.append((sum(1 for piece in plan.spans if piece.pieces), 1e3 * (planned - read)))
            times.append((len(plan.spans), served.plan_ms))
    spans, plan_ms = np.asarray(times, np.float64).T
    per_span, start = np.polyfit(spans, plan_ms, 1)
    full = statistics.median(server.serve(_new_tokens(rng, server, length), FULL).ttft_ms for _ in range(3))
    token_us = 1e3 * full / length
    turning = _turning_us(model, 8 * 1024 if settings["quick"] else 64 * 1024)
    span_us = 1e3 * max(float(per_span), 0.0)
    return {
        "read_content_ms": statistics.median(reading),
        "lookup_ms": statistics.median(ms for _, ms in found),
        "plan_start_ms": float(start),
        "plan_us_per_span": span_us,
        "turning_us_per_1k_tokens": turning,
        "computing_us_per_token": token_us,
        "hit_us_per_1k_tokens": span_us * 1024 / settings["span"] + turning,
        "crossover_tokens": span_us / max(token_us - turning / 1024, 1e-9),
    }


def _turning_us(model: Any, rows: int) -> float:
    """Microseconds for the keys of 1,024 tokens in all layers to be read, turned and stored: above what the kernels
    add, which turn them on the way."""
    width = model.row_format.rope_width // model.row_format.rope_heads
    heads = model.row_format.rope_heads
    delta = jnp.arange(rows, dtype=jnp.int32)
    turn = jax.jit(lambda keys: rotate(keys, delta, model.rotary), donate_argnums=0)
    keys = jax.block_until_ready(turn(jnp.zeros((rows, heads, width), model.dtype)))
    started = time.perf_counter()
    for _ in range(10):
        keys = turn(keys)
    jax.block_until_ready(keys)
    return 1e6 * (time.perf_counter() - started) / 10 * 1024 / rows * model.row_format.num_layers


def _decoding(server: Server, work: Work, copy: float, settings: dict[str, Any]) -> dict[str, float]:
    """A decode step of many requests against reading weights and rows at the copy rate, rows moved and not."""
    batch, context = settings["decode_batch"], settings["decode_context"]
    times = {}
    for moved in (False, True):
        times[moved] = statistics.median(
            decode_ms(server, batch=batch, context=context, moved=moved, repeats=settings["repeats"])
        )
    bound = 1e3 * (work.weight_bytes + batch * context * work.row_bytes) / copy
    return {
        "decode_step_ms": times[False],
        "decode_step_moved_ms": times[True],
        "decode_bound_ms": bound,
        "decode_over_bound": times[False] / bound,
        "decode_moved_over_unmoved": times[True] / times[False],
    }


def _summary(rows: list[dict[str, Any]], work: Work, peak: float, settings: dict[str, Any]) -> dict[str, float]:
    summary = {}
    joules = {(row["length"], row["placement"], row["fraction"]): row["joules"] for row in rows if "joules" in row}
    for row in rows:
        name = f"{row['length'] // 1024}k"
        if "joules" in row and row["placement"] != "full":
            saved = 1 - row["joules"] / joules[row["length"], "full", 0.0]
            summary[f"energy_saved_{name}_{round(100 * row['fraction'])}"] = saved
        if row["placement"] == "full":
            achieved = work.flops(np.arange(row["length"])) / (1e-3 * row["ttft_ms"])
            summary[f"ttft_full_{name}_ms"] = row["ttft_ms"]
            summary[f"prefill_matmul_fraction_{name}"] = achieved / peak
            continue
        share = round(100 * row["fraction"])
        where = "" if row["placement"] == "spread" else f"_{row['placement']}"
        summary[f"ttft_over_ideal_{name}_{share}{where}"] = row["over_ideal"]
    return summary


def _title(summary: dict[str, float], preset: str, lengths: list[int]) -> str:
    name = f"{lengths[0] // 1024}k"
    over = summary.get(f"ttft_over_ideal_{name}_80", float("nan"))
    return (
        f"{preset}, {name} tokens: {summary[f'ttft_full_{name}_ms']:,.0f} ms to the first token in full; with 80 % "
        f"from cache {over:.2f} times the ideal"
    )


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['length']:>7,} {row['placement']:>7} {row['fraction']:4.0%}: {row['ttft_ms']:8.1f} ms, ideal "
        f"{row['ideal_ms']:8.1f}, {row['over_ideal']:.2f}; plan {row['plan_ms']:.1f} ms"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    names = ("length", "placement", "fraction", "computed", "ttft_ms", "plan_ms", "ideal_ms", "over_ideal")
    return report.markdown_table(names, ([row[name] for name in names] for row in rows))
