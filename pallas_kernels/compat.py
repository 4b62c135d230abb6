"""The one place that touches interfaces of JAX without a promise of stability.

Written for JAX 0.11.2. The modules named here serve code inlined into Mosaic GPU kernels; the function says what it
does where its interface is missing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental.mosaic.gpu import core, fragmented_array, mma_utils, profiler
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator, wgmma_m64
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, scf, vector
from jaxlib.mlir.dialects import math as mathematics

__all__ = [
    "WGMMAAccumulator",
    "arith",
    "fragmented_array",
    "ir",
    "kernel_microseconds",
    "launched_microseconds",
    "llvm",
    "mathematics",
    "memref",
    "mma_utils",
    "mosaic",
    "mosaic_modules",
    "nvvm",
    "scf",
    "vector",
    "wgmma_m64",
]


def kernel_microseconds(compiled: jax.stages.Compiled, *args: Any) -> tuple[Any, dict[str, float]]:
    """Runs a compiled program and returns its results and how long its kernels ran on the device, summed by name.

    Times come from CUPTI, so neither launch latency nor gaps between kernels are part of them. The program runs once
    before to warm up. On another platform than CUDA there are no times.
    """
    if jax.devices()[0].platform != "gpu":
        return compiled(*args), {}
    results, kernels = profiler.Cupti(finalize=False).measure(compiled, aggregate=False)(*args)
    return results, _microseconds_by_name(kernels or ())


def launched_microseconds(run: Callable[[], Any]) -> dict[str, float]:
    """How long the kernels ran that a function launches, through whatever library, and waits for; summed by name.

    By the same timer as ``kernel_microseconds``, which takes programs of JAX alone. The function runs once before.
    """
    run()
    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    extension._cupti_init()
    try:
        run()
    finally:
        kernels = extension._cupti_get_timings(False)
    return _microseconds_by_name(kernels)


def mosaic_modules(function: Callable[..., Any], operands: dict[str, Any]) -> list[bytes]:
    """What Mosaic makes of the kernels a function calls with operands of such shapes, in the order it meets them."""
    known = set(core.KNOWN_KERNELS)
    jax.jit(function).trace(**operands).lower(lowering_platforms=("cuda",))
    return [module for name, module in core.KNOWN_KERNELS.items() if name not in known]


def _microseconds_by_name(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    for name, milliseconds in kernels:
        times[name] += 1e3 * milliseconds
    return dict(times)
