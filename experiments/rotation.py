"""How far a moved row is from a fresh one: relative L2 against float64, by dtype, storage, distance and mistake.

A key ``k`` (float64, before rotation) stands first at ``p`` and is wanted at ``q``. Exact is ``R(q) k`` in float64.
What a cache holds is a rounding of ``R(p) k`` (storage "base") or of ``k`` ("unrotated"), turned by ``R(q - p)`` or
``R(q)`` when it is used. Whatever the arithmetic, rounding once for storage costs ``1.66e-3`` in bfloat16: the floor.

The same rows are then put into attention (``experiments.latent_error``), since an error in a key matters only through
what attention makes of it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from ml_collections import ConfigDict

from experiments import recording, report, rotation_plots
from experiments.errors import InputError
from experiments.latent_error import attention_rows
from experiments.moved_keys import (
    PLAIN,
    Array64,
    bfloat16,
    exact_rotation,
    float32,
    fp8,
    int8,
    moved,
    relative_l2,
    turned_keys,
)
from experiments.subjects import Subject, documents, names, subject
from models.rotary import RopeParameters, attention_amplitude, frequencies
from pallas_kernels.rotary import FINE_STEPS, rotary_table

WIDTH = 64
MILLION = 2**20
DISTANCES = tuple(4**power for power in range(11))  # 1 to 2**20
PAPER = 4.7e-3
# DeepSeek-V2's rotary fields, whose amplitude is 1 because both mscales are equal, and the same with amplitude 1.37.
YARN = RopeParameters(10000.0, "yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
YARN_AMPLIFIED = RopeParameters(10000.0, "yarn", 40.0, 4096)


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Measures keys, then attention, then the rows of ``config.models``.

    Raises:
      InputError: for a setting that cannot be followed.
    """
    count = 2048 if config.quick else config.rows
    if count < 1 or config.chain < 1:
        raise InputError(f"rows={config.rows} and chain={config.chain} must be at least 1")
    subjects = [subject(name, seed=config.seed) for name in names(config)] if config.models else []
    texts, label = documents(config.text)
    rng = np.random.default_rng(config.seed)
    keys = rng.standard_normal((count, WIDTH))
    rows = [*storage_rows(keys, rng), *distance_rows(keys), *mistake_rows(keys, rng)]
    rows += chain_rows(keys, config.chain, rng)
    rows += attention_rows(config, rng)
    notes = [f"{count} random keys of width {WIDTH}, standard normal, theta 10,000; exact means float64 throughout."]
    tokens = 128 if config.quick else config.tokens
    for found in subjects:
        text = np.concatenate([found.encode(text) for text in texts[:40]])[:tokens]
        shift = min(found.model.max_position, 4096) - len(text)
        rows += model_rows(found, text, shift)
        notes.append(f"{found.note} {len(text)} tokens of {label}, moved by {shift} positions.")
    summary = summarise(rows)
    rotation_plots.plot_errors(rows, out / "error.png")
    rotation_plots.plot_attention(rows, out / "attention.png")
    return {
        "title": (
            f"A moved bfloat16 key is {summary['relative_l2_bf16']:.2g} from a fresh exact one at any distance, "
            f"of which {summary['relative_l2_bf16_storage']:.2g} is storage; "
            f"FP8 alone costs {summary['relative_l2_fp8']:.2g}"
        ),
        "summary": summary,
        "rows": rows,
        "notes": [*notes, _reading(summary)],
        "tables": [_table(rows)],
        "figures": ["error.png", "attention.png"],
    }


# What is measured


def storage_rows(keys: Array64, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Each way of storing, moved between random positions below one million, and left where it was."""
    base, target = rng.integers(0, MILLION, (2, len(keys)))
    theta = frequencies(PLAIN, keys.shape[1])
    exact, unmoved = exact_rotation(keys, target, theta), exact_rotation(keys, base, theta)
    cases = [
        ("bf16", bfloat16, {}),
        ("bf16, unrotated", bfloat16, {"storage": "unrotated"}),
        ("bf16, float32 output", bfloat16, {"output": jnp.float32}),
        ("float32", float32, {"output": jnp.float32}),
        ("fp8", fp8, {"output": jnp.float32}),
        ("int8", int8, {"output": jnp.float32}),
        ("bf16, half-split layout", bfloat16, {"interleaved": False}),
    ]
    rows = []
    for name, store, options in cases:
        compared = exact_rotation(keys, target, theta, interleaved=False) if "interleaved" in options else exact
        error = relative_l2(moved(keys, base, target, store, **options), compared)
        rows.append(
            {"what": "storage", "case": name, "relative_l2": error, "stored_only": relative_l2(store(unmoved), unmoved)}
        )
    for name, rope in (("bf16, YaRN", YARN), ("bf16, YaRN with amplitude 1.37", YARN_AMPLIFIED)):
        # The amplitude is multiplied into the key by the model, before it is stored: R(delta) keeps its norm.
        loud = keys * attention_amplitude(rope)
        wanted = exact_rotation(loud, target, frequencies(rope, keys.shape[1]))
        error = relative_l2(moved(loud, base, target, bfloat16, rope=rope), wanted)
        rows.append({"what": "storage", "case": name, "relative_l2": error})
    return rows


def distance_rows(keys: Array64) -> list[dict[str, Any]]:
    """Error by distance, from a base position of 37, for the table and for angles formed in float32 and bfloat16."""
    theta = frequencies(PLAIN, keys.shape[1])
    base = np.full(len(keys), 37)
    stored = bfloat16(exact_rotation(keys, base, theta))
    rows = []
    for distance in DISTANCES:
        exact = exact_rotation(keys, base + distance, theta)
        by_case = {
            "table": moved(keys, base, base + distance, bfloat16),
            "table, float32 rows and output": moved(keys, base, base + distance, float32, output=jnp.float32),
            "float32 angles, float32 rows and output": _formed(
                float32(exact_rotation(keys, base, theta)), base + distance, base, theta, np.float32
            ),
            "bf16 angles": bfloat16(_formed(stored, base + distance, base, theta, ml_dtypes.bfloat16)),
        }
        rows += [
            {"what": "distance", "case": case, "distance": distance, "relative_l2": relative_l2(actual, exact)}
            for case, actual in by_case.items()
        ]
    return rows


def _formed(stored: np.ndarray, target: np.ndarray, base: np.ndarray, theta: np.ndarray, dtype: Any) -> np.ndarray:
    """What caches do that form ``position * theta`` in ``dtype``: unrotate by ``base``, rotate by ``target``."""
    half = theta.astype(dtype)
    result = stored
    for position, sign in ((base, -1.0), (target, 1.0)):
        angle = (position[:, None].astype(dtype) * half).astype(dtype).astype(np.float32)
        cos, sin = np.cos(angle), np.sin(angle) * np.float32(sign)
        first, second = result[:, 0::2], result[:, 1::2]
        result = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(stored.shape)
    return result


def mistake_rows(keys: Array64, rng: np.random.Generator) -> list[dict[str, Any]]:
    """What the self-test of ``irminsul/rope.py`` must catch, and what no rotation at all costs."""
    base, target = rng.integers(0, 4096, (2, len(keys)))
    theta, table = frequencies(PLAIN, keys.shape[1]), rotary_table(frequencies(PLAIN, keys.shape[1]), interleaved=True)
    stored, exact = bfloat16(exact_rotation(keys, base, theta)), exact_rotation(keys, target, theta)
    amplitude = attention_amplitude(YARN_AMPLIFIED)
    cases = {
        "not rotated": stored,
        "wrong sign": turned_keys(stored, base - target, table, jnp.bfloat16),
        "wrong layout": turned_keys(stored, target - base, rotary_table(theta, interleaved=False), jnp.bfloat16),
        "YaRN amplitude inside R": amplitude * turned_keys(stored, target - base, table, jnp.bfloat16),
        "plain frequencies on a YaRN key": moved_with(keys, base, target, YARN, PLAIN),
    }
    yarn = exact_rotation(keys, target, frequencies(YARN, keys.shape[1]))
    return [
        {"what": "mistake", "case": case, "relative_l2": relative_l2(actual, yarn if "frequencies" in case else exact)}
        for case, actual in cases.items()
    ]


def moved_with(
    keys: Array64, base: np.ndarray, target: np.ndarray, rope: RopeParameters, used: RopeParameters
) -> np.ndarray:
    """Keys of a model with ``rope``, moved by the frequencies of ``used``."""
    width = keys.shape[1]
    stored = bfloat16(exact_rotation(keys, base, frequencies(rope, width)))
    return turned_keys(stored, target - base, rotary_table(frequencies(used, width), interleaved=True), jnp.bfloat16)


def chain_rows(keys: Array64, longest: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """A row moved again and again: from the stored row each time, or from the row of the move before."""
    theta = frequencies(PLAIN, keys.shape[1])
    table = rotary_table(theta, interleaved=True)
    position = np.zeros(len(keys), np.int64)
    stored = bfloat16(keys)
    chained, rows = stored, []
    for step in range(1, longest + 1):
        target = rng.integers(0, 100_000, len(keys))
        chained = turned_keys(chained, target - position, table, jnp.bfloat16)
        position = target
        if step in (1, 3, 10, 30, 100, longest):
            exact = exact_rotation(keys, target, theta)
            anew = turned_keys(stored, target, table, jnp.bfloat16)
            for case, actual in (("re-rotated", chained), ("from the stored row", anew)):
                rows.append({"what": "chain", "case": case, "moves": step, "relative_l2": relative_l2(actual, exact)})
    return rows


def model_rows(found: Subject, tokens: np.ndarray, shift: int) -> list[dict[str, Any]]:
    """A model's own keys, computed at 0, stored and moved by ``shift``, against keys computed there.

    Both sides run in float32, so the yardstick's own error is near 1e-6.
    """
    model = found.model
    near, far = (recording.run_text(model, jnp.asarray(tokens), jnp.int32(start)) for start in (0, shift))
    fresh = np.asarray(far.keys, np.float64)
    rows = []
    for case, store in (("bf16", bfloat16), ("fp8", fp8), ("int8", int8), ("float32", float32)):
        flat = np.asarray(near.keys, np.float64).reshape(-1, near.keys.shape[-1])
        stored = dataclasses.replace(near, keys=jnp.asarray(store(flat).reshape(near.keys.shape)))
        turned = np.asarray(recording.move(stored, shift, model.rotary).keys)
        turned = bfloat16(turned) if case == "bf16" else turned
        row = {"what": "model", "case": case, "model": found.name, "relative_l2": relative_l2(turned, fresh)}
        rows.append(row)
    rows.append(
        {
            "what": "model",
            "case": "latent, moved by doing nothing",
            "model": found.name,
            "relative_l2": relative_l2(near.latent, np.asarray(far.latent, np.float64)),
        }
    )
    return rows


# Summary


def find(rows: Sequence[dict[str, Any]], **fields: Any) -> float:
    """``relative_l2`` of the one row with these fields."""
    (row,) = (row for row in rows if all(row.get(name) == value for name, value in fields.items()))
    return row["relative_l2"]


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures a reader compares."""
    stored = {row["case"]: row for row in rows if row["what"] == "storage"}
    chain = max(row["moves"] for row in rows if row["what"] == "chain")
    summary = {
        "relative_l2_bf16": stored["bf16"]["relative_l2"],
        "relative_l2_bf16_unrotated": stored["bf16, unrotated"]["relative_l2"],
        "relative_l2_float32_output": stored["bf16, float32 output"]["relative_l2"],
        "relative_l2_bf16_storage": stored["bf16"]["stored_only"],
        "relative_l2_float32": stored["float32"]["relative_l2"],
        "relative_l2_fp8": stored["fp8"]["stored_only"],
        "relative_l2_fp8_moved": stored["fp8"]["relative_l2"],
        "relative_l2_int8": stored["int8"]["stored_only"],
        "relative_l2_int8_moved": stored["int8"]["relative_l2"],
        "relative_l2_yarn": stored["bf16, YaRN"]["relative_l2"],
        "relative_l2_at_1k": find(rows, what="distance", case="table", distance=FINE_STEPS),
        "relative_l2_at_1m": find(rows, what="distance", case="table", distance=MILLION),
        "relative_l2_float32_angles_at_1m": find(
            rows, what="distance", case="float32 angles, float32 rows and output", distance=MILLION
        ),
        "relative_l2_bf16_angles_at_1m": find(rows, what="distance", case="bf16 angles", distance=MILLION),
        "relative_l2_chained": find(rows, what="chain", case="re-rotated", moves=chain),
        "relative_l2_chained_from_stored": find(rows, what="chain", case="from the stored row", moves=chain),
    }
    for row in rows:
        if row["what"] == "mistake":
            summary["relative_l2_" + row["case"].lower().replace(" ", "_")] = row["relative_l2"]
        if row["what"] == "attention":
            summary["output_l2_" + row["case"].replace(",", "").replace(" ", "_")] = row["relative_l2"]
    return summary


def _reading(summary: dict[str, float]) -> str:
    return (
        f"Rounding for storage costs {summary['relative_l2_bf16_storage']:.3g}; a bfloat16 key written back after the "
        f"move is rounded twice, {summary['relative_l2_bf16']:.3g} (the paper reports {PAPER:.2g}). Attention turns "
        f"keys in float32 and never writes them back, so what it sees is {summary['relative_l2_float32_output']:.3g}. "
        f"Rows kept in FP8 are {summary['relative_l2_fp8']:.3g} off before anything moves."
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    listed = [row for row in rows if row["what"] != "distance"]
    cells = []
    for row in listed:
        detail = row.get("model") or (f"{row['moves']} moves" if "moves" in row else "")
        cells.append((row["what"], row["case"], detail, row["relative_l2"]))
    return "## Every case\n\n" + report.markdown_table(("measured", "case", "", "relative L2"), cells)
