"""Tokens a second of one device and of meshes: prompts of one length, and steps of many requests, all warm.

Weights are random, and the same numbers on every mesh, so that what is timed is compared as well: logits behind the
first prompt, in the dtype and by the kernels that are timed.
"""

import contextlib
import re
import statistics
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.decode_speed import decode_ms, decoding_of
from experiments.names import listed
from experiments.reuse_prompts import FULL, Server
from experiments.sharding_processes import mesh_of
from irminsul.blocks import cost_model
from irminsul.compute import run_prefill
from irminsul.decode import decode_step
from irminsul.prefill import pack_batch, settle
from models import families, sharding
from models.families import Model
from models.random_weights import random_model_on_device

ONE = "one device"
SETTINGS = (
    *("preset", "layers", "dtype", "length", "block", "pool_tokens", "decode_batches", "decode_context", "repeats"),
    "seed",
)


class Speed:
    """Times ``ONE`` and meshes by name; ``folder`` keeps the logits that others are compared with."""

    def __init__(self, settings: dict[str, Any], shape: dict[str, int], folder: Path):
        self.settings, self.logits = settings, folder / "one_device.npy"
        self.shape = {**shape, **({"num_hidden_layers": settings["layers"]} if settings["layers"] else {})}
        self.dtype = jnp.dtype(settings["dtype"])
        self.batches = [int(text) for text in listed(settings["decode_batches"])]

    @cached_property
    def model(self) -> Model:
        return random_model_on_device(self.settings["preset"], self.settings["seed"], self.dtype, **self.shape)

    def compile(self, name: str) -> list[dict[str, Any]]:
        """Compiles what ``rows`` runs from shapes alone, for JAX's compilation cache: by program seconds, temporary
        memory, and how many collectives stand in it; those of a layer stand there once for each kind of layer."""
        family, config = families.read_config(self.settings["preset"], **self.shape)
        rotary = family.rotary(config)
        with _on(name) as mesh:
            if mesh is None:
                params = families.abstract(family, config, self.dtype)
            else:
                params = sharding.abstract(family, config, mesh, self.dtype)
                rotary = jax.device_put(rotary, NamedSharding(mesh, PartitionSpec()))
            server = self._server(Model(params, rotary, config, family, "shapes"))
            started, cache = [time.perf_counter()], server.cache
            proposal = server.propose(cache, np.arange(self.settings["length"], dtype=np.int32) % 97, FULL)
            admission = settle(proposal)
            batch = pack_batch(admission.cache, admission.placement, admission.request)
            pool = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if mesh else None),
                cache.pool,
            )
            jax.tree.map(lambda leaf: leaf.delete(), cache.pool)  # the memory may be somebody else's
            compiled = run_prefill.lower(
                server.model, pool, batch, blocks=proposal.blocks, cost=cost_model(server.model),
                storage=cache.config.storage, keep_hidden=False,
            ).compile()  # fmt: skip
            counts = [_inside(compiled)]
            started.append(time.perf_counter())
            for size in self.batches:
                decoding = decoding_of(server, batch=size, context=self.settings["decode_context"], moved=False)
                compiled = decode_step.lower(server.model, pool, *decoding, storage=cache.config.storage).compile()
                counts.append(_inside(compiled))
                started.append(time.perf_counter())
        programs = ["prefill", *(f"decode_{size}" for size in self.batches)]
        return [
            row
            for program, seconds, found in zip(programs, np.diff(started).tolist(), counts, strict=True)
            for row in (
                {"what": f"{program}_compile_seconds", "mesh": name, "value": seconds},
                *({"what": f"{program}_{kind}", "mesh": name, "value": value} for kind, value in found.items()),
            )
        ]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Medians with the least and the most, and how far logits are from one device's."""
        with _on(name) as mesh:
            server = self._server(self.model if mesh is None else sharding.shard(self.model, mesh))
            seconds, logits = self._prompts(server)
            found = [_rate(f"prefill_{self.settings['length']}", name, self.settings["length"], seconds)]
            for size in self.batches:
                context, repeats = self.settings["decode_context"], self.settings["repeats"]
                steps = decode_ms(server, batch=size, context=context, moved=False, repeats=repeats)
                found.append(_rate(f"decode_{size}", name, size, [1e-3 * step for step in steps]))
        if self.logits.exists():
            one = np.load(self.logits)
            off = np.sqrt(np.mean(np.square(logits - one))) / np.std(one)
            found.append({"what": f"rms_difference_{self.dtype}", "mesh": name, "value": float(off)})
        elif mesh is None:
            np.save(self.logits, logits)
        return found

    def _server(self, model: Model) -> Server:
        server = Server.create(
            model,
            pool_tokens=self.settings["pool_tokens"],
            max_prompt_tokens=self.settings["length"],
            dtype=self.settings["dtype"],
        )
        server.sizes = (self.settings["block"],)  # the only one compiled
        return server

    def _prompts(self, server: Server) -> tuple[list[float], np.ndarray]:
        """Seconds from prompt to logits of every repeat, the first of all, which compiles, left out; its logits."""
        draw, seconds = np.random.default_rng(self.settings["seed"]), []
        kept: list[np.ndarray] = []
        for _ in range(self.settings["repeats"] + 1):
            prompt = draw.integers(0, server.model.vocab_size, self.settings["length"], np.int32)
            started = time.perf_counter()
            logits, _, _ = server.submit(prompt, FULL)
            jax.block_until_ready(logits)
            seconds.append(time.perf_counter() - started)
            kept = kept or [np.asarray(logits, np.float32)]
        return seconds[1:], kept[0]


def _inside(compiled: jax.stages.Compiled) -> dict[str, float]:
    """How often each kind of collective stands in a program, and gigabytes that it takes beside what it is given."""
    kinds, text = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"), compiled.as_text()
    counts = {kind.replace("-", "_") + "s": len(re.findall(rf" {kind}(?:-start)?\(", text or "")) for kind in kinds}
    memory = compiled.memory_analysis()
    found: dict[str, float] = {kind: count for kind, count in counts.items() if count}
    return found | ({} if memory is None else {"temporary_gb": memory.temp_size_in_bytes / 1e9})


@contextlib.contextmanager
def _on(name: str) -> Iterator[jax.sharding.Mesh | None]:
    mesh = None if name == ONE else mesh_of(name)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield mesh


def _rate(what: str, name: str, tokens: int, seconds: list[float]) -> dict[str, Any]:
    rates = sorted(tokens / one for one in seconds)
    return {
        "what": f"{what}_tokens_per_second",
        "mesh": name,
        "value": tokens / statistics.median(seconds),
        "least": rates[0],
        "most": rates[-1],
        "repeats": len(seconds),
    }
