"""Float64 numpy oracle of rotated latent attention, and problems to try it on.

Pools start as NaN and only the rows that some table entry makes visible are written, so that a read of anything else
shows. Tables end in padding entries whose page ids are junk.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_table import PageTable
from pallas_kernels.rotary import RotaryTable, rotary_table

JUNK_PAGES = (2**30, -7, 2**31 - 1)


@dataclass(frozen=True)
class Problem:
    """Inputs of one call as numpy arrays (``entries``: per request ``(page, begin, end, target, base)``)."""

    q_latent: np.ndarray
    q_rope: np.ndarray
    query_position: np.ndarray
    query_offsets: np.ndarray
    latent_pages: np.ndarray
    rope_pages: np.ndarray
    layer: int
    entries: tuple[tuple[tuple[int, int, int, int, int], ...], ...]
    capacity: int
    frequencies: np.ndarray
    interleaved: bool
    scale: float
    dtype: str = "float32"

    @property
    def rotary(self) -> RotaryTable:
        return rotary_table(self.frequencies, interleaved=self.interleaved)

    @property
    def page_table(self) -> PageTable:
        """Entries, then padding with junk in every field."""
        table = np.zeros((len(self.entries), self.capacity, 5), np.int32)
        for request, entries in enumerate(self.entries):
            for slot in range(self.capacity):
                row = slot % 4
                table[request, slot] = (JUNK_PAGES[slot % 3], row, row, -7919 * slot, 2**31 - 1 - slot)
            if entries:
                table[request, : len(entries)] = entries
        return PageTable(*(jnp.asarray(table[:, :, field]) for field in range(5)))

    def arguments(self):
        """Positional arguments of ``rotated_latent_attention``."""
        latent, rope = (jnp.asarray(pages, self.dtype) for pages in (self.latent_pages, self.rope_pages))
        queries = (jnp.asarray(query, self.dtype) for query in (self.q_latent, self.q_rope))
        positions = (jnp.asarray(x, jnp.int32) for x in (self.query_position, self.query_offsets))
        return (*queries, *positions, latent, rope, jnp.int32(self.layer), self.page_table, self.rotary)


def random_problem(
    seed: int,
    *,
    rows: tuple[int, ...] = (37,),
    queries: tuple[int, ...] = (11,),
    heads: int = 3,
    latent_width: int = 7,
    rope_width: int = 6,
    page_size: int = 5,
    first_position: int = 0,
    interleaved: bool = True,
    dtype: str = "float32",
    num_pages: int = 79,
    capacity: int | None = None,
    full_pages: bool = False,
) -> Problem:
    """Requests of ``rows[b]`` rows on shuffled pages, the last ``queries[b]`` positions (at least) asking.

    Entries cover random row ranges of their pages unless ``full_pages``, in shuffled order; two thirds were moved.
    """
    rng = np.random.default_rng(seed)
    layers, layer = 2, 1
    latent_pages = np.full((layers, num_pages, page_size, latent_width), np.nan, np.float32)
    rope_pages = np.full((layers, num_pages, page_size, rope_width), np.nan, np.float32)
    free = list(rng.permutation(num_pages))
    entries = []
    for count in rows:
        mine, done = [], 0
        while done < count:
            begin = 0 if full_pages else int(rng.integers(page_size))
            end = min(page_size if full_pages else int(rng.integers(begin, page_size)) + 1, begin + count - done)
            page, target = int(free.pop()), first_position + done
            # Every third entry stands where it was computed.
            base = target if rng.integers(3) == 0 else int(rng.integers(2_000_000))
            latent_pages[layer, page, begin:end] = rng.standard_normal((end - begin, latent_width))
            rope_pages[layer, page, begin:end] = rng.standard_normal((end - begin, rope_width))
            mine.append((page, begin, end, target, base))
            done += end - begin
        if not full_pages:
            rng.shuffle(mine)
        entries.append(tuple(tuple(int(x) for x in entry) for entry in mine))
    tokens = sum(queries)
    position = [
        first_position + max(count, 1) - 1 - np.arange(asked)[::-1] for count, asked in zip(rows, queries, strict=True)
    ]
    longest = max(len(mine) for mine in entries)
    return _storable(
        Problem(
            q_latent=rng.standard_normal((tokens, heads, latent_width), np.float32),
            q_rope=rng.standard_normal((tokens, heads, rope_width), np.float32),
            query_position=np.concatenate(position).astype(np.int32),
            query_offsets=np.cumsum([0, *queries]).astype(np.int32),
            latent_pages=latent_pages,
            rope_pages=rope_pages,
            layer=layer,
            entries=tuple(entries),
            capacity=longest + 3 if capacity is None else capacity,
            frequencies=10000.0 ** (-np.arange(rope_width // 2) / (rope_width // 2)),
            interleaved=interleaved,
            scale=float((latent_width + rope_width) ** -0.5),
            dtype=dtype,
        )
    )


def _storable(problem: Problem) -> Problem:
    """Rounds what is stored to the problem's dtype, so that the oracle sees what the op sees."""
    names = ("q_latent", "q_rope", "latent_pages", "rope_pages")
    return replace(
        problem, **{name: np.asarray(jnp.asarray(getattr(problem, name), problem.dtype), np.float32) for name in names}
    )


def rotate64(x: np.ndarray, delta: int, frequencies: np.ndarray, interleaved: bool) -> np.ndarray:
    """``R(delta) x`` in float64, pair by pair as complex numbers."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first + 1j * second) * np.exp(1j * (delta * np.asarray(frequencies, np.float64)))
    pairs = np.stack([turned.real, turned.imag], axis=-1 if interleaved else -2)
    return pairs.reshape(x.shape)


def visible_rows(problem: Problem, request: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Latents ``[n, C]``, rotated keys ``[n, R]`` and positions ``[n]`` of a request, in table order, float64."""
    latents, keys, positions = [], [], []
    for page, begin, end, target, base in problem.entries[request]:
        latents.append(problem.latent_pages[problem.layer, page, begin:end].astype(np.float64))
        key = problem.rope_pages[problem.layer, page, begin:end]
        keys.append(rotate64(key, target - base, problem.frequencies, problem.interleaved))
        positions.append(target + np.arange(end - begin))
    width, rope_width = problem.latent_pages.shape[-1], problem.rope_pages.shape[-1]
    return (
        np.concatenate([np.zeros((0, width)), *latents]),
        np.concatenate([np.zeros((0, rope_width)), *keys]),
        np.concatenate([np.zeros(0, np.int64), *positions]),
    )


def oracle(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Output ``[M, H, C]`` and log-sum-exp ``[M, H]`` of every query, one at a time."""
    out = np.zeros(problem.q_latent.shape)
    lse = np.full(problem.q_latent.shape[:2], -np.inf)
    for request in range(len(problem.entries)):
        latents, keys, positions = visible_rows(problem, request)
        for token in range(problem.query_offsets[request], problem.query_offsets[request + 1]):
            seen = positions <= problem.query_position[token]
            if not seen.any() or problem.query_position[token] < 0:
                continue
            latent, key = latents[seen], keys[seen]
            query, rope = problem.q_latent[token].astype(np.float64), problem.q_rope[token].astype(np.float64)
            scores = problem.scale * (query @ latent.T + rope @ key.T)
            largest = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            out[token] = weights / total @ latent
            lse[token] = (largest + np.log(total))[:, 0]
    return out, lse
