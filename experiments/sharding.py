"""One device against several: the same logits, time of a prompt, several processes, and a checkpoint loaded into parts.

Steps that are done are kept in ``DIR/steps.json``: a command with the same settings goes on behind them, and a step may
be run under other flags of the compiler than the last one.
"""

import dataclasses
import json
import statistics
import time
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
from experiments.sharding_processes import difference, mesh_of, two_logits
from irminsul.cache import CacheConfig, new_cache
from irminsul.prefill import complete, propose, settle, start_computing
from models import sharding
from models.families import Model
from models.random_weights import random_model_on_device

QUICK = {"dtype": "float32", "length": 256, "compared": 128, "repeats": 2, "checkpoint_gb": 0.02, "layers": 3}
Rows = list[dict[str, Any]]


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Loads, times and compares on every mesh, and compares processes; what has no size or no mesh is left out.

    Raises:
      InputError: for a mesh that cannot be read or has more devices than there are.
    """
    settings = {**config.to_dict(), **(QUICK if config.quick else {})}
    shape = {**QUICK_SHAPE, "vocab_size": 1024} if config.quick else {}
    meshes = {text: mesh_of(text) for text in listed(settings["meshes"])}
    steps = _Steps(out / "steps.json", settings)
    rows: Rows = []
    if settings["checkpoint_gb"]:
        rows += steps.once("load", ("preset", "checkpoint_gb", "filled"), lambda: _loaded(settings, shape, meshes))
    timed = _Timed(settings, shape)
    for name in ["one device", *listed(settings["timed_meshes"])] if settings["repeats"] else []:
        rows += steps.once(
            f"time {name}", ("preset", "layers", "dtype", "length", "repeats", "seed"), partial(timed.rows, name)
        )
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
            f"{settings['preset']}, random weights. Time: {settings['layers']} layers in {settings['dtype']}, new "
            f"prompts of {settings['length']:,} tokens, nothing reused, medians of {settings['repeats']}. Logits: "
            f"{settings['compared_layers']} layers in float32, a prompt of {settings['compared']:,} tokens, and it "
            "once more behind another header with its rows reused at other positions; the largest difference from one "
            "device's, over their deviation.",
            "The checkpoint has the published layout and, unless `filled`, zeros in files without a block on disk. It "
            "is read plainly and loaded by as many readers, both from a cold page cache. `host peak` is what the "
            "process holds beside mapped files, `resident peak` all of it, both over the largest tensor.",
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
    worst = max((row["value"] for row in rows if "logit_difference" in row["what"]), default=None)
    parts = [] if worst is None else [f"logits of several devices are within {worst:.1e} of one device's"]
    if "load_gb_per_second" in found:
        parts.append(
            f"a checkpoint of {found['checkpoint_gb']:.1f} GB loads into parts at {found['load_gb_per_second']:.1f} "
            f"GB/s, {found['load_over_plain_read']:.2f} of plain reading"
        )
    text = "; ".join(parts or ["tokens a second of one device and of several"])
    return text[0].upper() + text[1:]


def _table(rows: Rows) -> str:
    lines = [f"| {row['what'].replace('_', ' ')} | {row['mesh']} | {row['value']:.4g} |" for row in rows]
    return "\n".join(["| what | mesh | value |", "|---|---|---:|", *lines])


def _key(mesh: str) -> str:
    return mesh.replace("=", "_").replace(" ", "_")


def _loaded(settings: dict[str, Any], shape: dict[str, int], meshes: dict[str, Mesh]) -> Rows:
    name, mesh = next(iter(meshes.items()))
    found = sharding_load.measure(
        settings["preset"], shape, settings["checkpoint_gb"], mesh, settings["scratch"], filled=settings["filled"]
    )
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
        return two_logits(self.model, self.settings["compared"], self.settings["seed"])

    def rows(self, name: str, mesh: Mesh) -> Rows:
        one, shifted = self.one
        with jax.set_mesh(mesh):
            split = sharding.shard(self.model, mesh)
            many, shifted_on_mesh = two_logits(split, self.settings["compared"], self.settings["seed"])
        if shifted != shifted_on_mesh or not shifted:
            raise RuntimeError(f"{name}: {shifted_on_mesh} rows were reused on the mesh and {shifted} on one device")
        kinds = zip(("logit_difference", "logit_difference_reused"), many, one, strict=True)
        return [{"what": what, "mesh": name, "value": difference(new, old)} for what, new, old in kinds]


class _Timed:
    """Tokens a second of one device or of a mesh, for prompts that fill the largest block, the only one compiled:
    several meshes take minutes otherwise."""

    def __init__(self, settings: dict[str, Any], shape: dict[str, int]):
        self.settings, self.shape = settings, {**shape, "num_hidden_layers": settings["layers"]}

    @cached_property
    def model(self) -> Model:
        dtype = jnp.dtype(self.settings["dtype"])
        return random_model_on_device(self.settings["preset"], self.settings["seed"], dtype, **self.shape)

    def rows(self, name: str) -> Rows:
        if name == "one device":
            seconds = self.seconds(self.model)
        else:
            mesh = mesh_of(name)
            with jax.set_mesh(mesh):
                seconds = self.seconds(sharding.shard(self.model, mesh))
        value = self.settings["length"] / statistics.median(seconds)
        return [{"what": "tokens_per_second", "mesh": name, "value": value, "seconds": seconds}]

    def seconds(self, model: Model) -> list[float]:
        draw, length = np.random.default_rng(self.settings["seed"]), self.settings["length"]
        config = CacheConfig(
            num_pages=4 * length // 64, max_prompt_tokens=length, dtype=self.settings["dtype"], dependence=False
        )
        cache, seconds = new_cache(config, model.row_format), []
        for repeat in range(self.settings["repeats"] + 1):
            proposal = propose(model, cache, draw.integers(0, model.vocab_size, length, np.int32), "full")
            proposal = dataclasses.replace(proposal, blocks=proposal.blocks[-1:])
            started = time.perf_counter()
            logits, _, proposal = start_computing(model, proposal)
            jax.block_until_ready(logits)
            if repeat:  # the first one compiles
                seconds.append(time.perf_counter() - started)
            admission = settle(proposal)
            cache = complete(admission.cache, admission.request)
        return seconds
