"""Named shapes that tests, tuning and benchmarks of latent attention share.

``DECODE`` has one query token a request, ``EXTEND`` many query tokens of one request behind a cached context; ``SMALL``
are odd shapes of the same kinds that any machine runs in a moment.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_table import PageTable
from pallas_kernels.rotary import rotary_table

DeltaPattern = Literal["none", "every_8_pages", "every_page"]
# Rows missing at the end of a span of equal distance: a stored segment seldom fills its last page.
SPAN_TAIL = 27
# Distances differ from one span to the next and repeat after this many, within what a rotary table can turn by.
DISTANCES, DISTANCE_STEP = 1009, 4099


@dataclass(frozen=True)
class ArgSpec:
    """``requests`` requests of ``query_tokens`` queries each, the last of ``kv_length`` rows.

    ``delta_pattern`` says how often along the table the distance changes: where it does, spans begin one row into
    their first page and end part full. Pages of a request are scattered over the pool.
    """

    heads: int
    requests: int
    query_tokens: int
    kv_length: int
    delta_pattern: DeltaPattern = "every_8_pages"
    latent_width: int = 512
    rope_width: int = 64
    page_size: int = 64
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As reports and test ids have it."""
        return f"h{self.heads}_b{self.requests}_t{self.query_tokens}_l{self.kv_length}_{self.delta_pattern}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of the scores and values that causality leaves."""
        rows = self.kv_length * self.query_tokens - self.query_tokens * (self.query_tokens - 1) // 2
        return 2 * self.requests * self.heads * rows * (2 * self.latent_width + self.rope_width)

    @property
    def row_bytes(self) -> int:
        """Bytes of all visible rows, each read once."""
        width = self.latent_width + self.rope_width
        return self.requests * self.kv_length * width * jnp.dtype(self.dtype).itemsize


def entries(spec: ArgSpec) -> list[tuple[int, int, int, int]]:
    """One request's ``(row_begin, row_end, target_position, delta)``, before pages are assigned."""
    span = {"none": None, "every_8_pages": 8, "every_page": 1}[spec.delta_pattern]
    listed: list[tuple[int, int, int, int]] = []
    position = 0
    while position < spec.kv_length:
        begin, end, delta = 0, spec.page_size, 0
        if span is not None:
            begin = int(len(listed) % span == 0)
            end -= min(SPAN_TAIL, spec.page_size // 2) * (len(listed) % span == span - 1)
            delta = 1 + DISTANCE_STEP * (len(listed) // span % DISTANCES)
        end = min(end, begin + spec.kv_length - position)
        listed.append((begin, end, position, delta))
        position += end - begin
    return listed


def frequencies(spec: ArgSpec) -> np.ndarray:
    """Radians per position of each rotary pair, float64; pairs are interleaved."""
    return 10000.0 ** (-np.arange(spec.rope_width // 2) / (spec.rope_width // 2))


def arguments(spec: ArgSpec, seed: int = 0, *, layers: int = 2, capacity: int = 0) -> dict[str, Any]:
    """Random keyword arguments of ``rotated_latent_attention``: a pool of ``layers`` layers of which layer 1 is read.

    Tables are padded to ``capacity`` entries, each with a page in the pool, so that specs that differ in
    ``delta_pattern`` alone have arguments of the same shapes.
    """
    rng = np.random.default_rng(seed)
    listed = np.asarray(entries(spec), np.int32)
    listed = np.pad(listed, ((0, max(0, capacity - len(listed))), (0, 0)))
    count = len(listed)
    num_pages = spec.requests * count
    page_id = rng.permutation(num_pages).astype(np.int32).reshape(spec.requests, count)
    begin, end, target, delta = (np.broadcast_to(listed[:, field], page_id.shape) for field in range(4))
    table = PageTable(*(jnp.asarray(field, jnp.int32) for field in (page_id, begin, end, target, target + delta)))
    tokens = spec.requests * spec.query_tokens
    position = np.tile(np.arange(spec.kv_length - spec.query_tokens, spec.kv_length), spec.requests)
    return {
        "q_latent": _normal(rng, (tokens, spec.heads, spec.latent_width), spec.dtype),
        "q_rope": _normal(rng, (tokens, spec.heads, spec.rope_width), spec.dtype),
        "query_position": jnp.asarray(position, jnp.int32),
        "query_offsets": jnp.arange(spec.requests + 1, dtype=jnp.int32) * spec.query_tokens,
        "latent_pages": _normal(rng, (layers, num_pages, spec.page_size, spec.latent_width), spec.dtype),
        "rope_pages": _normal(rng, (layers, num_pages, spec.page_size, spec.rope_width), spec.dtype),
        "layer": jnp.int32(1),
        "page_table": table,
        "rotary": rotary_table(frequencies(spec), interleaved=True),
        "scale": float((128 + spec.rope_width) ** -0.5),
    }


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal values; gigabytes of them repeat after a million."""
    size = math.prod(shape)
    values = jnp.asarray(rng.standard_normal(min(size, 2**20), np.float32), jnp.dtype(dtype))
    repeats = -(-size // values.size)
    return jnp.broadcast_to(values[None], (repeats, values.size)).reshape(-1)[:size].reshape(shape)


DECODE = tuple(
    ArgSpec(heads, requests, 1, length)
    for heads, requests, length in (
        (16, 1, 4096),
        (16, 16, 16384),
        (16, 64, 4096),
        (16, 128, 16384),
        (64, 64, 16384),
        (64, 128, 4096),
        (128, 1, 65536),
        (128, 16, 16384),
        (128, 64, 4096),
        (128, 64, 16384),
        (128, 128, 4096),
        (128, 128, 16384),
    )
)
EXTEND = tuple(
    ArgSpec(heads, 1, tokens, cached + tokens)
    for heads, tokens, cached in (
        (16, 128, 8192),
        (16, 128, 32768),
        (16, 1024, 8192),
        (16, 1024, 32768),
        (128, 128, 8192),
        (128, 1024, 32768),
    )
)
_odd: dict[str, Any] = {"latent_width": 22, "rope_width": 10, "page_size": 11, "dtype": "float32"}
SMALL = (
    ArgSpec(3, 5, 1, 131, "every_8_pages", **_odd),
    ArgSpec(3, 1, 37, 131, "every_page", **_odd),
    ArgSpec(2, 3, 71, 131, "none", **_odd),
)
