"""Counting compilations: after warm-up, one more is a failure."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompilationCount:
    """Programs compiled, and seconds spent on them, since counting began."""

    def __init__(self) -> None:
        self.programs = 0
        self.seconds = 0.0

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Receives one of JAX's monitoring events."""
        if event == BACKEND_COMPILE:
            self.programs += 1
            self.seconds += duration_secs


@contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Counts every program this process compiles inside the context, whoever asked for it."""
    count = CompilationCount()
    jax.monitoring.register_event_duration_secs_listener(count.listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(count.listen)
