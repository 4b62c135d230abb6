"""How long a decode step takes at production shape, against the bytes it has to read."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reuse_prompts import Server
from irminsul.decode import DecodeBatch, decode_step
from irminsul.sampling import Sampling
from pallas_kernels.page_table import page_table_from_array

STEPS = 16


def decode_ms(server: Server, *, batch: int, context: int, moved: bool, repeats: int) -> list[float]:
    """Milliseconds a step of ``batch`` requests with ``context`` rows each, over pages of the pool; with ``moved``,
    every run of eight pages was computed elsewhere. Rows are whatever the pool holds: time does not depend on it."""
    request, sampling = decoding_of(server, batch=batch, context=context, moved=moved)
    storage, pool, found = server.cache.config.storage, server.cache.pool, []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        for _ in range(STEPS):
            token, _, pool = decode_step(server.model, pool, request, sampling, storage=storage)
        jax.block_until_ready(token)
        if repeat:  # the first compiles
            found.append(1e3 * (time.perf_counter() - started) / STEPS)
    server.cache = dataclasses.replace(server.cache, pool=pool)
    return found


def decoding_of(server: Server, *, batch: int, context: int, moved: bool) -> tuple[DecodeBatch, Sampling]:
    """What ``decode_ms`` times a step of."""
    size = server.cache.config.page_size
    pages = -(-(context + 1) // size)
    draw = np.random.default_rng(0)
    owned = draw.permutation(server.cache.config.num_pages)[: batch * pages].reshape(batch, pages)
    entries = np.zeros((batch, pages + pages % 2, 5), np.int32)
    entries[:, :pages, 0] = owned
    entries[:, :pages, 2] = size
    entries[:, pages - 1, 2] = context + 1 - (pages - 1) * size
    entries[:, :pages, 3] = entries[:, :pages, 4] = np.arange(pages) * size
    if moved:
        entries[:, : pages - 1, 4] += 64 * (1 + np.arange(pages - 1) // 8)
    last = entries[:, pages - 1]
    fields = {
        "token": draw.integers(0, server.model.vocab_size, batch).astype(np.int32),
        "position": np.full(batch, context, np.int32),
        "write_page": last[:, 0],
        "write_row": last[:, 2] - 1,
    }
    zeros = jnp.zeros(batch, jnp.float32)
    sampling = Sampling(zeros, zeros + 1, jnp.zeros(batch, jnp.int32))
    return DecodeBatch(page_table=page_table_from_array(entries), **jax.device_put(fields)), sampling
