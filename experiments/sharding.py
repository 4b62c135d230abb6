"""One device against several: the same logits, tokens a second, several processes, a checkpoint loaded into parts.

Steps that are done are kept in ``DIR/steps.json``: a command with the same settings goes on behind them, and a step may
be run under other flags of the compiler than the last one.
"""

import json
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import report, sharding_load, sharding_processes
from experiments.errors import InputError
from experiments.latency import QUICK_SHAPE
from experiments.names import listed
from experiments.sharding_processes import KINDS, difference, mesh_of, served_logits
from experiments.sharding_speed import ONE, SETTINGS, Speed
from models import sharding
from models.families import Model
from models.random_weights import random_model_on_device

QUICK = {
    "dtype": "float32", "length": 256, "block": 256, "pool_tokens": 2048, "decode_batches": "2", "decode_context": 128,
    "compared": 128, "repeats": 2, "checkpoint_gb": 0.02, "layers": 3,
}  # fmt: skip
Rows = list[dict[str, Any]]


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Loads, times and compares on every mesh, and compares processes; what has no size or no mesh is left out.

    Raises:
      InputError: for a mesh that cannot be read or has more devices than there are.
    """
    settings = {**config.to_dict(), **(QUICK if config.quick else {})}
    shape = {**QUICK_SHAPE, "vocab_size": 1024} if config.quick else {}
    meshes = {text: None if text == ONE else mesh_of(text) for text in listed(settings["meshes"])}
    steps = _Steps(out / "steps.json", settings)
    rows: Rows = []
    if settings["checkpoint_gb"] and any(meshes.values()):
        rows += steps.once(
            "load", ("preset", "checkpoint_gb", "filled", "plain"), lambda: _loaded(settings, shape, meshes)
        )
    speed = Speed(settings, shape, out)
    for name in listed(settings["timed"]):
        if settings["compile_only"]:
            rows += speed.compile(name)
        elif settings["repeats"]:
            rows += steps.once(f"time {name}", SETTINGS, partial(speed.rows, name))
    compared = _Compared(settings, shape)
    for name, mesh in meshes.items() if settings["compared"] else []:
        rows += steps.once(
            f"compare {name}", ("preset", "compared_layers", "compared", "seed"), partial(compared.rows, name, mesh)
        )
    if listed(settings["process_meshes"]):
        rows += steps.once("processes", ("processes", "process_meshes"), lambda: _processes(settings))
    if not rows:
        raise InputError("checkpoint_gb, repeats, compared and process_meshes are all empty; nothing is asked for")
    summary = {f"{row['what']}_{_key(row['mesh'])}": row["value"] for row in rows}
    return {
        "title": _title(rows),
        "summary": summary,
        "rows": rows,
        "notes": [
            f"{settings['preset']}, random weights. Time: {settings['layers'] or 'all'} layers in {settings['dtype']}, "
            f"new prompts of {settings['length']:,} tokens, nothing reused, from prompt to logits; steps of requests "
            f"with {settings['decode_context']:,} rows each; medians of {settings['repeats']} with the least and the "
            "most, all compiled before.",
            f"Logits: {settings['compared_layers']} layers in float32, a prompt of {settings['compared']:,} tokens, "
            "the same once more behind another header with its rows reused at other positions, and a token decoded "
            "behind that; the largest difference from one device's, over their deviation; for `one device` that of its "
            "own computed in other blocks. `rms difference`: of what is timed, the root of the mean square over the "
            "deviation.",
            "The checkpoint has the published layout and, unless `filled`, zeros in files without a block on disk. "
            "Eight threads read it plainly (`plain read`: through a cold page cache, `warm`: from it, "
            "`past cache`: as the loader does what is not in it; the faster of two). It is loaded cold, once more with "
            "all programs compiled (`again`), and from a `warm` page cache. Peaks of memory are beyond the level "
            "before, over the largest tensor: `private` and `shared` pages, both (`held`), pages of mapped `files`, "
            "all (`resident`), and what the whole machine holds beside files (`machine`).",
            f"{settings['processes']} processes, found through SLURM's variables: each has four virtual devices if "
            "they are CPUs, otherwise one, and reads its parts of a small published checkpoint.",
        ],
        "tables": [_table(rows)],
    }


class _Steps:
    """Rows of the steps that are done, in a file, by name and settings."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, settings
        self.done: dict[str, Rows] = json.loads(path.read_text()) if path.exists() else {}

    def once(self, name: str, keys: tuple[str, ...], compute: Callable[[], Rows]) -> Rows:
        step = json.dumps([name, jax.devices()[0].device_kind, *(self.settings[key] for key in (*keys, "quick"))])
        if step not in self.done:
            self.done[step] = compute()
            self.path.write_text(json.dumps(self.done, indent=1) + "\n")
        print(self.done[step], flush=True)
        return self.done[step]


def _title(rows: Rows) -> str:
    found = {row["what"]: row["value"] for row in rows}
    apart = [row["value"] for row in rows if "logit_difference" in row["what"] and row["mesh"] != ONE]
    worst = max(apart, default=None)
    parts = [] if worst is None else [f"logits of several devices are within {worst:.1e} of one device's"]
    if "load_gb_per_second" in found:
        read = found.get("load_over_plain_read")
        parts.append(
            f"a checkpoint of {found['checkpoint_gb']:.1f} GB loads into parts at "
            f"{found['load_gb_per_second']:.1f} GB/s"
            + ("" if read is None else f", {read:.2f} of reading plainly through a cold page cache")
        )
    text = "; ".join(parts or ["tokens a second of one device and of several"])
    return text[0].upper() + text[1:]


def _table(rows: Rows) -> str:
    lines = [
        f"| {row['what'].replace('_', ' ')} | {row['mesh']} | {row['value']:.4g} "
        + (f"| {row['least']:.4g} to {row['most']:.4g} |" if "least" in row else "| |")
        for row in rows
    ]
    return "\n".join(["| what | mesh | value | least to most |", "|---|---|---:|---|", *lines])


def _key(mesh: str) -> str:
    return mesh.replace("=", "_").replace(" ", "_")


def _loaded(settings: dict[str, Any], shape: dict[str, int], meshes: dict[str, Mesh | None]) -> Rows:
    name, mesh = next((name, mesh) for name, mesh in meshes.items() if mesh is not None)
    found = sharding_load.measure(
        settings["preset"], shape, settings["checkpoint_gb"], mesh, settings["scratch"],
        filled=settings["filled"], plain=settings["plain"],
    )  # fmt: skip
    return [{"what": what, "mesh": name, "value": value} for what, value in found.items()]


def _processes(settings: dict[str, Any]) -> Rows:
    found = sharding_processes.compare(listed(settings["process_meshes"]), settings["processes"])
    return [
        {"what": what, "mesh": f"{settings['processes']} processes {name}", "value": value}
        for name, values in found.items()
        for what, value in values.items()
    ]


class _Compared:
    """Float32 logits of a mesh against one device's, new and with reused rows."""

    def __init__(self, settings: dict[str, Any], shape: dict[str, int]):
        self.settings, self.shape = settings, {**shape, "num_hidden_layers": settings["compared_layers"]}

    @cached_property
    def model(self) -> Model:
        return random_model_on_device(self.settings["preset"], self.settings["seed"], jnp.float32, **self.shape)

    @cached_property
    def one(self) -> tuple[np.ndarray, int]:
        return served_logits(self.model, self.settings["compared"], self.settings["seed"])

    def rows(self, name: str, mesh: Mesh | None) -> Rows:
        one, shifted = self.one
        prompt = self.settings["compared"], self.settings["seed"]
        if mesh is None:  # in other blocks: how far another order of the sums alone puts them apart
            many, shifted_on_mesh = served_logits(self.model, *prompt, mode="fast")
        else:
            with jax.set_mesh(mesh):
                many, shifted_on_mesh = served_logits(sharding.shard(self.model, mesh), *prompt)
        if shifted != shifted_on_mesh or not shifted:
            raise RuntimeError(f"{name}: {shifted_on_mesh} rows were reused on the mesh and {shifted} on one device")
        return [
            {"what": f"logit_difference_{kind}", "mesh": name, "value": difference(new, old)}
            for kind, new, old in zip(KINDS, many, one, strict=True)
        ]
