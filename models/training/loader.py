"""Batches by step, made ahead of time in other processes.

``make(step)`` must depend on ``step`` alone. Then the position in the data is the step, and a resumed run sees what the
unbroken one would have seen, whatever the number of workers.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

Make = Callable[[int], Any]

_make: Make | None = None


def _start(factory: Callable[..., Make], arguments: tuple) -> None:
    global _make  # one per worker process: what it makes batches with
    _make = factory(*arguments)


def _call(step: int) -> Any:
    assert _make is not None
    return _make(step)


def batches(
    factory: Callable[..., Make], arguments: tuple, first: int, last: int, *, workers: int = 0, ahead: int = 48
) -> Iterator[Any]:
    """``factory(*arguments)(step)`` for steps ``first`` to ``last - 1``, in order.

    Args:
      factory: makes the function of the step; called once per process, so it and ``arguments`` must be picklable.
      arguments: of ``factory``.
      first: first step.
      last: exclusive.
      workers: processes; 0 makes batches in this one.
      ahead: batches made ahead of the one in use.
    """
    if workers == 0:
        make = factory(*arguments)
        yield from (make(step) for step in range(first, last))
        return
    # Spawned, since a fork of a process that holds an accelerator may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(factory, arguments)) as pool:
        waiting: deque[Future] = deque()
        steps = iter(range(first, last))
        try:
            while True:
                while len(waiting) < ahead and (step := next(steps, None)) is not None:
                    waiting.append(pool.submit(_call, step))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
