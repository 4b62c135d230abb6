"""Times latent attention on the device and writes one JSON file.

    python -m pallas_kernels.bench --out=docs/benchmarks/rotated_latent_attention_h200.json

Every call reads another layer of a pool several times larger than the second-level cache, so rows come from memory.
Times are those of the kernels on the device (CUPTI), summed over a call: attention, merging of splits, moving queries
into tiles; the plan, which layers share, is made once a program of many calls, and what its loop takes to count them is
subtracted. Where there is no such timer (a CPU) the host's clock around the program stands in. Ceilings are measured
between the shapes, in the power state they run in.

A row is one shape and one pattern of distances; ``rotation`` false is the same kernel with rotation compiled out.
Rows of ``storage`` "unrotated" turn every key by its own position: in XLA where the form is absorbed.
``--quick`` takes the odd little shapes of ``arg_specs.SMALL``, which run anywhere in seconds; a CPU takes no others.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.compat import kernel_microseconds
from pallas_kernels.page_table import Storage
from pallas_kernels.rotated_latent_attention import api, hopper
from pallas_kernels.rotated_latent_attention.arg_specs import (
    DECODE,
    EXTEND,
    SMALL,
    ArgSpec,
    DeltaPattern,
    arguments,
    entries,
    frequencies,
)

PATTERNS: tuple[DeltaPattern, ...] = ("every_8_pages", "none", "every_page")
# Shapes that are also timed with keys stored before rotation, and in which form.
UNROTATED = {
    "16_64_1_4096": "absorbed",
    "128_64_1_4096": "absorbed",
    "16_1_1024_33792": "expanded",
    "3_1_37_131": "absorbed",
}
POOL_BYTES = 2**29
REPEATS = 7
# A program makes calls for about this long.
PROGRAM_SECONDS = 0.01
COMPILING_THREADS = 12
KEY_WIDTH = VALUE_WIDTH = 128
# Operands of a call of the absorbed kernels, and those of what layers share.
INPUTS = ("q_latent", "q_rope", "latent_pages", "rope_pages")
PLANNED = ("query_position", "query_offsets", "page_table", "rotary")
MATMUL_SIZE = 8192

Operands = dict[str, Any]
# Operands and a layer to output and log-sum-exp; what it returns for the operands alone is made once a program.
Attend = Callable[[Operands], Callable[[jax.Array], Any]]


@dataclass(frozen=True)
class Task:
    """One program: a shape under some patterns, in one form."""

    spec: ArgSpec
    form: str
    rotation: bool
    patterns: tuple[DeltaPattern, ...]
    storage: Storage = "base"

    @property
    def layers(self) -> int:
        """Of the pool: enough that no call finds its rows in the second-level cache."""
        return min(16, max(2, -(-POOL_BYTES // self.spec.row_bytes)))

    @property
    def calls(self) -> int:
        """One full round of the layers and a bit, at about the ceilings of an H200."""
        estimate = max(self.spec.row_bytes / 4e12, self.spec.flops / 6e14) + 5e-6
        return min(64, max(3, int(PROGRAM_SECONDS / estimate)))

    @property
    def capacity(self) -> int:
        """Entries that the longest pattern needs: one program serves all, with rotation and without."""
        patterns = PATTERNS if self.form == "absorbed" else self.patterns
        return max(len(entries(replace(self.spec, delta_pattern=pattern))) for pattern in patterns)


def main(argv: list[str] | None = None) -> None:
    """Runs what the arguments choose and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rotated_latent_attention.json"))
    parser.add_argument("--quick", action="store_true", help="little shapes, few repeats")
    parser.add_argument("--only", default="", help="shapes to run, comma-separated: heads_batch_tokens_length")
    options = parser.parse_args(argv)
    quick = options.quick or jax.devices()[0].platform == "cpu"
    specs = SMALL if quick else DECODE + EXTEND
    chosen = [spec for spec in specs if not options.only or _shape(spec) in options.only.split(",")]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for result in run(chosen, 2 if quick else REPEATS, 64 if quick else MATMUL_SIZE):
        # Written after every shape: a run that is cut short leaves what it has.
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def run(specs: list[ArgSpec], repeats: int, matmul_size: int) -> Iterator[dict[str, Any]]:
    """The result so far, after every program."""
    tasks = sorted((task for spec in specs for task in tasks_of(spec)), key=lambda task: task.form)
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(COMPILING_THREADS) as pool:
        programs = [pool.submit(compiled, task) for task in tasks]
    # All of them before the first is timed: compiling tries kernels on the device.
    groups: dict[Any, list[tuple[Task, jax.stages.Compiled]]] = {}
    for task, program in zip(tasks, programs, strict=True):
        groups.setdefault((task.form, task.spec, task.storage), []).append((task, program.result()))
    copies, products = [copy_gbps(matmul_size)], [matmul_tflops(matmul_size)]
    for group in groups.values():
        for row in timed_rows(group, repeats):
            print(json.dumps(row), flush=True)
            rows.append(row)
        if not group[-1][0].rotation:
            copies.append(copy_gbps(matmul_size))
            products.append(matmul_tflops(matmul_size))
        ceilings = {
            "copy_gbps": statistics.median(copies),
            "matmul_tflops": statistics.median(products),
            "copy_gbps_range": [min(copies), max(copies)],
            "matmul_tflops_range": [min(products), max(products)],
        }
        yield {"environment": environment(), "ceilings": ceilings, "rows": rows}


def environment() -> dict[str, str]:
    """Where the figures were obtained, and with which timer."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": str(getattr(device.client, "platform_version", "")).splitlines()[0],
        "timer": "kernels on the device (CUPTI)" if device.platform == "gpu" else "host clock",
    }


def tasks_of(spec: ArgSpec) -> list[Task]:
    """A shape in every form that exists for it here."""
    tasks = [Task(spec, "absorbed", True, PATTERNS)]
    if api.hopper_available():
        tasks.append(Task(spec, "absorbed", False, PATTERNS[:1]))
    if spec.requests == 1 and spec.query_tokens > 1:
        tasks.append(Task(spec, "expanded", True, PATTERNS[:1]))
    if form := UNROTATED.get(_shape(spec)):
        tasks.append(Task(spec, form, True, ("none",), "unrotated"))
    return tasks


def operands_of(task: Task) -> Operands:
    """Of the first pattern."""
    spec = task.spec
    operands = arguments(replace(spec, delta_pattern=task.patterns[0]), layers=task.layers, capacity=task.capacity)
    if task.form == "expanded":
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = {
            "w_uk": (spec.heads, KEY_WIDTH, spec.latent_width),
            "w_uv": (spec.heads, spec.latent_width, VALUE_WIDTH),
            "q_nope": (spec.query_tokens, spec.heads, KEY_WIDTH),
        }
        for key, (name, shape) in zip(keys, shapes.items(), strict=True):
            operands[name] = (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(spec.dtype)
        del operands["q_latent"], operands["query_offsets"]
    del operands["scale"]
    return operands


def attention(task: Task) -> Attend:
    """What the task calls: the Hopper kernels where programs are compiled for them, else what the API chooses."""
    scale = scale_of(task.spec)
    if task.form == "expanded":
        implementation: api.Implementation | None = "mosaic_gpu" if api.hopper_available() else None
        settings: dict[str, Any] = {"scale": scale, "storage": task.storage, "implementation": implementation}
        attend = partial(api.expanded_latent_attention, **settings)
        return lambda operands: lambda layer: attend(**operands | {"layer": layer})
    if not api.hopper_available() or task.storage == "unrotated":
        attend = partial(api.rotated_latent_attention, scale=scale, storage=task.storage)
        return lambda operands: lambda layer: attend(**operands | {"layer": layer})

    def by_plan(operands: Operands) -> Callable[[jax.Array], Any]:
        plan, inputs = planned(task, operands), {name: operands[name] for name in INPUTS}
        return lambda layer: hopper.attend(plan, **inputs, layer=layer, scale=scale, rotate=task.rotation)

    return by_plan


def planned(task: Task, operands: Operands) -> hopper.Plan:
    """What layers share: how queries and table are laid out."""
    return hopper.plan(*(operands[name] for name in PLANNED), heads=task.spec.heads)


def scale_of(spec: ArgSpec) -> float:
    """Of the logits, as DeepSeek's models have it."""
    return float((KEY_WIDTH + spec.rope_width) ** -0.5)


def shape_of(spec: ArgSpec) -> dict[str, int]:
    """As rows of results name it."""
    return {
        "heads": spec.heads,
        "batch": spec.requests,
        "query_tokens": spec.query_tokens,
        "kv_length": spec.kv_length,
    }


def compiled(task: Task) -> jax.stages.Compiled:
    """Calls one after the other, each on the next layer; returns what the last one did."""
    attend = attention(task)

    def program(operands: Operands) -> Any:
        call = attend(operands)
        shapes = jax.eval_shape(call, operands["layer"])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, task.calls, lambda index, _: call(index % task.layers), nothing)

    return jax.jit(program).lower(jax.eval_shape(lambda: operands_of(task))).compile()


def counting_microseconds(task: Task) -> float:
    """What a program's loop takes a call to count calls and to choose the layer: two kernels of a microsecond."""
    count = jax.jit(lambda layer: lax.fori_loop(0, task.calls, lambda index, _: index % task.layers, layer))
    _, kernels = kernel_microseconds(count.lower(jnp.int32(0)).compile(), jnp.int32(0))
    return sum(kernels.values()) / task.calls


def timed_rows(group: list[tuple[Task, jax.stages.Compiled]], repeats: int) -> Iterator[dict[str, Any]]:
    """One row a task and pattern; all read the same operands and take turns, in alternating order.

    So drifting clocks meet all alike, and what follows a program that draws little power does not always do so.
    """
    operands = operands_of(group[0][0])
    cases = [(task, program, replace(task.spec, delta_pattern=p)) for task, program in group for p in task.patterns]
    tables = [arguments(spec, layers=1, capacity=task.capacity)["page_table"] for task, _, spec in cases]
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    last: list[Any] = [None] * len(cases)
    counting = counting_microseconds(group[0][0])
    for turn in range(repeats + 1):
        for case in sorted(range(len(cases)), reverse=turn % 2 == 1):
            task, program, _ = cases[case]
            operands["page_table"] = tables[case]
            start = time.perf_counter()
            last[case] = jax.block_until_ready(program(operands))
            wall = 1e6 * (time.perf_counter() - start)
            if turn == 0:
                continue
            last[case], kernels = kernel_microseconds(program, operands)
            total, largest = (sum(kernels.values()), max(kernels.values())) if kernels else (wall, wall)
            times[case].append((total / task.calls - counting, largest / task.calls))
    for (task, _, spec), table, results, measured in zip(cases, tables, last, times, strict=True):
        totals = [total for total, _ in measured]
        operands["page_table"] = table
        microseconds = statistics.median(totals)
        error = None
        if task.form == "absorbed" and task.rotation:
            out, lse = results
            error = errors(task, operands, out, lse, frequencies(spec))
        yield {
            "form": task.form,
            **shape_of(spec),
            "rotation": task.rotation,
            "delta_pattern": spec.delta_pattern,
            "storage": task.storage,
            "microseconds": round(microseconds, 2),
            "kernel_microseconds": round(statistics.median(largest for _, largest in measured), 2),
            "spread": round((max(totals) - min(totals)) / microseconds, 4),
            "tflops": round(spec.flops / microseconds * 1e-6, 1),
            "gbps": round(spec.row_bytes / microseconds * 1e-3, 1),
            "relative_error": error and error[0],
            "log_sum_exp_error": error and error[1],
        }


def errors(task: Task, operands: Operands, out: jax.Array, lse: jax.Array, radians: np.ndarray) -> tuple[float, float]:
    """Of the first and the last query against float64: norm of the error over the norm; largest of log-sum-exp."""
    layer = (task.calls - 1) % task.layers
    tokens = sorted({0, out.shape[0] - 1})
    expected = [float64_attention(operands, token, layer, radians, task.storage) for token in tokens]
    exact, exact_lse = (np.stack(parts) for parts in zip(*expected, strict=True))
    actual, actual_lse = (np.asarray(x[np.asarray(tokens)], np.float64) for x in (out, lse))
    error = np.linalg.norm(actual - exact) / np.linalg.norm(exact)
    return float(f"{error:.3g}"), float(f"{np.max(np.abs(actual_lse - exact_lse)):.3g}")


def float64_attention(
    operands: Operands, token: int, layer: int, radians: np.ndarray, storage: Storage
) -> tuple[np.ndarray, np.ndarray]:
    """One query over the rows it sees, on the host; pairs interleaved."""
    request = int(np.searchsorted(np.asarray(operands["query_offsets"]), token, "right")) - 1
    table = operands["page_table"]
    page, begin, end, target, base = (
        np.asarray(field[request])
        for field in (table.page_id, table.row_begin, table.row_end, table.target_position, table.base_position)
    )
    latent, rope = (np.asarray(operands[pages][layer, page], np.float64) for pages in ("latent_pages", "rope_pages"))
    row = np.arange(latent.shape[1])
    place = target[:, None] + row - begin[:, None]
    seen = (row >= begin[:, None]) & (row < end[:, None]) & (place <= int(operands["query_position"][token]))
    positions = place if storage == "unrotated" else np.broadcast_to((target - base)[:, None], place.shape)
    turn = np.exp(1j * positions[..., None] * radians)
    turned = ((rope[..., 0::2] + 1j * rope[..., 1::2]) * turn)[seen]
    keys = np.stack([turned.real, turned.imag], axis=-1).reshape(len(turned), -1)
    latent_query, rope_query = (np.asarray(operands[name][token], np.float64) for name in ("q_latent", "q_rope"))
    scale = (KEY_WIDTH + rope.shape[-1]) ** -0.5
    scores = scale * (latent_query @ latent[seen].T + rope_query @ keys.T)
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ latent[seen], (largest + np.log(total))[:, 0]


def copy_gbps(size: int) -> float:
    """Bytes read and written a second by an elementwise kernel over ``8 size^2`` values."""
    source = jax.random.normal(jax.random.key(0), (8 * size, size), jnp.float32)
    seconds = _seconds(_scaled, source, source, 5)
    return float(f"{2 * source.nbytes / seconds * 1e-9:.4g}")


def matmul_tflops(size: int) -> float:
    """Sustained rate of a bfloat16 product of random matrices."""
    left, right = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2))
    return float(f"{2 * size**3 / _seconds(_product, left, right, 150) * 1e-12:.4g}")


@jax.jit
def _scaled(x: jax.Array, _: jax.Array) -> jax.Array:
    return x * 1.0001


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return left @ right


def _seconds(function: Callable[..., jax.Array], left: jax.Array, right: jax.Array, calls: int) -> float:
    """A call's time on the host's clock, launches in flight."""
    result = jax.block_until_ready(function(left, right))
    start = time.perf_counter()
    for _ in range(calls):
        result = function(left, right)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _shape(spec: ArgSpec) -> str:
    return f"{spec.heads}_{spec.requests}_{spec.query_tokens}_{spec.kv_length}"


if __name__ == "__main__":
    main()
