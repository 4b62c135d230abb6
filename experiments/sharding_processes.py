"""Several processes as one device: each reads its parts of a published checkpoint, all serve, logits are compared.

Processes find each other as SLURM's do (``jax.distributed.initialize`` without arguments); those of one machine stand
for hosts. On CPUs each has four virtual devices and sums go through gloo, on GPUs each has one and they go through
NCCL.
"""

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from experiments.errors import InputError
from irminsul.blocks import Mode
from irminsul.cache import CacheConfig, new_cache
from irminsul.decode import advance, start_decoding
from irminsul.prefill import complete, prefill
from models import checkpoint, families
from models.families import Model
from models.sharded_checkpoint import load_sharded

TOKENS = 150
# Exact float32 products take XLA minutes to tune, and Triton's take as long to compile.
QUICK_TO_COMPILE = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 128,
}  # fmt: skip


def mesh_of(text: str) -> Mesh:
    """The mesh of ``tensor=2`` or ``tensor=2xsequence=2``, over the first devices of all processes.

    Raises:
      InputError: for anything else, or more devices than there are.
    """
    axes = re.findall(r"(tensor|expert|sequence)=(\d+)", text)
    if not axes or "x".join(f"{name}={size}" for name, size in axes) != text:
        raise InputError(f"meshes: {text!r} is no mesh; write axes like tensor=2 or tensor=2xsequence=2")
    names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
    count = math.prod(sizes)
    if count > jax.device_count():
        raise InputError(f"meshes: {text!r} needs {count} devices and there are {jax.device_count()}")
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count])


KINDS = ("new", "reused", "decoded")


def served_logits(
    model: Model, length: int, seed: int, page_size: int = 64, mode: Mode = "deterministic"
) -> tuple[np.ndarray, int]:
    """Float32 logits by ``KINDS``: behind a new prompt, behind the same one with another header, and behind one more
    token there; how many rows of the second were reused at other positions."""
    draw = np.random.default_rng(seed)
    first = draw.integers(0, model.vocab_size, length, np.int32)
    second = np.concatenate([draw.integers(0, model.vocab_size, 23, np.int32), first[20:]])
    longest = len(second)
    config = CacheConfig(
        num_pages=8 * -(-2 * longest // (8 * page_size)) + 8,
        page_size=page_size,
        max_prompt_tokens=longest,
        max_new_tokens=1,
    )
    cache, logits = new_cache(config, model.row_format), []
    with jax.default_matmul_precision("highest"):
        for prompt in (first, second):
            result = prefill(model, cache, prompt, mode=mode, new_tokens=1)
            logits.append(np.asarray(result.logits))
            if prompt is first:
                cache = complete(result.cache, result.request)
        assert result.logits is not None
        decoding = advance(model, start_decoding(result.cache, result.request, result.logits), int(first[0]))
        logits.append(np.asarray(decoding.logits))
    return np.stack(logits), result.request.plan.bins["shifted"]


def difference(many: np.ndarray, one: np.ndarray) -> float:
    """The largest difference of logits, over their deviation."""
    return float(np.max(np.abs(many - one)) / np.std(one))


def compare(meshes: Sequence[str], processes: int) -> dict[str, dict[str, float]]:
    """By mesh: logits of ``processes`` processes against those of one device, by ``KINDS``, over their deviation; and
    rows reused.

    Raises:
      RuntimeError: with what a process said, if it failed; if other rows are reused than on one device.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_safetensors(families.random_model("deepseek-v2-lite", 3, **SHAPE), Path(folder) / "published")
        one = _start(folder, [""], 1)[0][""]
        logits = np.asarray(one["logits"])
        together = _start(folder, meshes, processes)
        for mesh in meshes:
            many = [process[mesh] for process in together]
            if any(other["shifted"] != one["shifted"] for other in many) or not one["shifted"]:
                raise RuntimeError(f"{mesh}: rows reused differ, {[other['shifted'] for other in [one, *many]]}")
            worst = np.max(
                [
                    [difference(*pair) for pair in zip(np.asarray(other["logits"]), logits, strict=True)]
                    for other in many
                ],
                axis=0,
            )
            found[mesh] = {
                **{f"logit_difference_{kind}": float(value) for kind, value in zip(KINDS, worst, strict=True)},
                "rows_reused": one["shifted"],
                "devices": many[0]["devices"],
            }
    return found


def _start(folder: str, meshes: Sequence[str], processes: int) -> list[dict[str, Any]]:
    """Runs them all and waits: what each found, by mesh."""
    job = _free_port() - 61440  # JAX adds this to a job's number for the coordinator's port
    started = []
    for index in range(processes):
        cluster = {
            "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(processes),
            "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index),
        }  # fmt: skip
        environment = {**os.environ, "JAX_PLATFORMS": jax.default_backend().replace("gpu", "cuda")}
        if jax.default_backend() == "cpu":
            environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        else:
            environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            environment.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)
        command = [sys.executable, "-m", "experiments.sharding_processes", folder, *meshes]
        with (Path(folder) / f"{index}.txt").open("w") as said:
            started.append(
                subprocess.Popen(
                    command, env=environment | (cluster if meshes[0] else {}), stdout=said, stderr=subprocess.STDOUT
                )
            )
    codes = [process.wait(timeout=600) for process in started]
    for index, code in enumerate(codes):
        if code:
            text = (Path(folder) / f"{index}.txt").read_text()
            raise RuntimeError(f"process {index} of {processes} ended with {code}: {text[-2000:]}")
    return [json.loads((Path(folder) / f"{processes}-{index}.json").read_text()) for index in range(processes)]


def _free_port() -> int:
    """One of the ports that JAX lets a SLURM job have."""
    for port in np.random.default_rng().permutation(np.arange(61440, 65536)):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", int(port))):
                return int(port)
    raise InputError("processes: every port from 61440 to 65535 is in use; free one for the coordinator")


def main(folder: str, *meshes: str) -> None:
    """One process: what it was served on each mesh, as JSON beside the checkpoint; no name is one device."""
    if meshes[0]:
        if os.environ["JAX_PLATFORMS"] == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize()
    found = {}
    for name in meshes:
        mesh = mesh_of(name) if name else None
        if mesh is not None and mesh.size != jax.device_count():
            raise InputError(f"process_meshes: {name!r} leaves out some of {jax.device_count()} devices; use them all")
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            published = Path(folder) / "published"
            if mesh is None:
                model = checkpoint.load(published, jnp.float32)
            else:
                model = load_sharded(published, mesh, jnp.float32, digest="published")
            logits, shifted = served_logits(model, TOKENS, seed=0, page_size=16)
        found[name] = {"logits": logits.tolist(), "shifted": shifted, "devices": jax.device_count()}
    path = Path(folder) / f"{jax.process_count()}-{jax.process_index()}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
