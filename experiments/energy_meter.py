"""Energy of a piece of work: by the total-energy counter of the GPU (NVML), or, where there is none, by a model."""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax

# Joules a floating-point operation and a byte moved, fitted by least squares to the rows of mla and gqa in
# docs/results/energy_h200 (bfloat16, one H200), which they meet within 9 %; recurrent models took up to 1.8 times as
# much. For machines without a counter: what they give is a model's figure.
JOULES_PER_FLOP, JOULES_PER_BYTE = 1.37e-12, 0.22e-9


@dataclasses.dataclass(frozen=True)
class Reading:
    """Of one piece of work, averaged over a window: joules, joules less what the idle device takes, seconds; and how
    many there were."""

    joules: float
    net_joules: float
    seconds: float
    times: int


class Meter:
    """Energy of the one GPU this process sees. The counter moves every 100 ms or so: windows of 2 s and more."""

    def __init__(self, handle: Any, nvml: Any):
        self._handle, self._nvml = handle, nvml
        self.idle_watts = 0.0

    def joules(self) -> float:
        """Since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def measure_idle(self, seconds: float) -> None:
        """Power with the process awake and nothing to do."""
        started, before = time.perf_counter(), self.joules()
        time.sleep(seconds)
        self.idle_watts = (self.joules() - before) / (time.perf_counter() - started)

    def measure(self, serve: Callable[[float], tuple[Any, int]], seconds: float, repeats: int) -> list[Reading]:
        """``repeats`` windows of at least ``seconds`` behind a call that warms up. ``serve`` works for so many seconds,
        at least once, and returns what to wait for and how often it did the piece of work."""
        jax.block_until_ready(serve(0.0)[0])
        readings = []
        for _ in range(repeats):
            started, before = time.perf_counter(), self.joules()
            result, times = serve(seconds)
            jax.block_until_ready(result)
            spent = time.perf_counter() - started
            joules = self.joules() - before
            readings.append(Reading(joules / times, (joules - self.idle_watts * spent) / times, spent / times, times))
        return readings


def meter() -> Meter | None:
    """The counter of the visible GPU; None without one, or without ``nvidia-ml-py`` (the extra ``energy``)."""
    if jax.devices()[0].platform != "gpu":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        pynvml.nvmlInit()
        by_index = visible.isdigit()
        find = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
        handle = find(int(visible) if by_index else visible)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return Meter(handle, pynvml)


def modelled(flops: float, moved_bytes: float) -> Reading:
    """What the counter would say, roughly, of so many operations and bytes; no time is claimed."""
    joules = JOULES_PER_FLOP * flops + JOULES_PER_BYTE * moved_bytes
    return Reading(joules, joules, 0.0, 0)
