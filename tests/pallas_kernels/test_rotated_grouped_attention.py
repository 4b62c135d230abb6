"""``rotated_grouped_attention`` against a float64 loop, and the guarantees the cache builds on."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_table import PageTable
from pallas_kernels.rotary import rotary_table
from pallas_kernels.rotated_grouped_attention.api import rotated_grouped_attention
from tests.tolerances import assert_close

LAYERS, PAGES, ROWS = 2, 29, 5
LAYER = 1
WIDTH = 14
SCALE = 0.3
FREQUENCIES = 10000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))


@dataclasses.dataclass
class Case:
    query: np.ndarray
    position: np.ndarray
    offsets: np.ndarray
    values: np.ndarray
    keys: np.ndarray
    entries: list[list[tuple[int, int, int, int, int]]]
    key_heads: int
    interleaved: bool = False
    storage: str = "base"
    capacity: int = 19

    def table(self):
        """Entries of each request, then padding that names pages which do not exist."""
        rows = np.zeros((len(self.entries), self.capacity, 5), np.int32)
        rows[..., 0] = 10**6
        for request, entries in enumerate(self.entries):
            rows[request, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 5)
        return PageTable(*(jnp.asarray(rows[..., field]) for field in range(5)))

    def run(self, dtype=jnp.float32):
        rotary = rotary_table(FREQUENCIES, interleaved=self.interleaved, max_delta=8192)
        out, lse = jitted()(
            jnp.asarray(self.query, dtype),
            jnp.asarray(self.position),
            jnp.asarray(self.offsets),
            jnp.asarray(self.values, dtype),
            jnp.asarray(self.keys, dtype),
            jnp.int32(LAYER),
            self.table(),
            rotary,
            key_heads=self.key_heads,
            storage=self.storage,
        )
        return np.asarray(out, np.float32), np.asarray(lse)


@functools.cache
def jitted():
    return jax.jit(functools.partial(rotated_grouped_attention, scale=SCALE), static_argnames=("key_heads", "storage"))


def make_case(heads=6, key_heads=3, seed=0, interleaved=False):
    """Two requests that share a page at different distances; a third without queries; unused rows are NaN."""
    rng = np.random.default_rng(seed)
    entries = [
        [(7, 0, 5, 0, 0), (3, 1, 4, 5, 4011), (11, 0, 2, 8, 1)]
        + [(12 + s, 0, 5, 10 + 5 * s, 9 + 7 * s) for s in range(9)],
        [(4, 2, 3, 40, 40), (3, 2, 5, 0, 4012), (28, 0, 0, 0, 0), (27, 0, 5, 3, 0)],
        [(26, 0, 5, 0, 0)],
    ]
    shape = (LAYERS, PAGES, ROWS, key_heads * WIDTH)
    values, keys = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for page, begin, end, _, _ in itertools.chain(*entries):
        size = (end - begin, shape[-1])
        values[LAYER, page, begin:end] = rng.standard_normal(size)
        keys[LAYER, page, begin:end] = rng.standard_normal(size)
    position = np.array([54, 0, 7, -1, 11, 31, 2, 7, 41, -1, 9], np.int32)
    offsets = np.array([0, 6, 10, 10], np.int32)  # token 10 belongs to nobody
    query = rng.standard_normal((len(position), heads, WIDTH)).astype(np.float32)
    return Case(query, position, offsets, values, keys, entries, key_heads, interleaved)


def turn(x, delta, interleaved):
    """``R(delta) x`` in float64, from the definition."""
    half = WIDTH // 2
    first, second = (x[0::2], x[1::2]) if interleaved else (x[:half], x[half:])
    turned = (first + 1j * second) * np.exp(1j * delta * FREQUENCIES)
    if interleaved:
        return np.stack([turned.real, turned.imag], -1).reshape(-1)
    return np.concatenate([turned.real, turned.imag])


def oracle(case, sign=1):
    """One query, one head, one row at a time, in float64."""
    tokens, heads, _ = case.query.shape
    out, lse = np.zeros(case.query.shape), np.full((tokens, heads), -np.inf)
    for request, entries in enumerate(case.entries):
        for m in range(case.offsets[request], case.offsets[request + 1]):
            for head in range(heads):
                lanes = slice(head // (heads // case.key_heads) * WIDTH, None)
                scores, rows = [], []
                for page, begin, end, target, base in entries:
                    for row in range(begin, end):
                        if target + row - begin > case.position[m]:
                            continue
                        key = case.keys[LAYER, page, row, lanes][:WIDTH].astype(np.float64)
                        delta = target + row - begin if case.storage == "unrotated" else target - base
                        key = turn(key, sign * delta, case.interleaved)
                        scores.append(SCALE * case.query[m, head].astype(np.float64) @ key)
                        rows.append(case.values[LAYER, page, row, lanes][:WIDTH].astype(np.float64))
                if scores:
                    lse[m, head] = np.logaddexp.reduce(scores)
                    out[m, head] = np.exp(scores - lse[m, head]) @ np.array(rows)
    return out, lse


def assert_lse_close(actual, expected, dtype="float32"):
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    seen = ~np.isneginf(expected)
    assert_close(actual[seen], expected[seen], dtype)


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 3), (5, 1), (3, 3)], ids=["gqa", "mqa", "mha"])
@pytest.mark.parametrize(("interleaved", "storage"), [(False, "base"), (True, "base"), (True, "unrotated")])
def test_equals_float64_loop(heads, key_heads, interleaved, storage):
    case = dataclasses.replace(make_case(heads, key_heads, interleaved=interleaved), storage=storage)
    out, lse = case.run()
    expected_out, expected_lse = oracle(case)
    assert_close(out, expected_out)
    assert_lse_close(lse, expected_lse)
    backwards, _ = oracle(case, sign=-1)
    assert np.abs(out - backwards).max() > 0.1  # the other sign would not have passed


def test_bfloat16_within_table():
    case = make_case()
    for name in ("query", "keys", "values"):  # so that only the arithmetic is compared
        setattr(case, name, np.asarray(jnp.asarray(getattr(case, name), jnp.bfloat16), np.float32))
    out, lse = case.run(jnp.bfloat16)
    expected_out, expected_lse = oracle(case)
    assert_close(out, expected_out, "bfloat16")
    assert_lse_close(lse, expected_lse, "float32")  # scores are float32 whatever the rows are


def test_queries_without_rows():
    case = make_case()
    out, lse = case.run()
    empty = np.array([3, 9, 10])  # padding, padding, owned by no request
    assert np.all(out[empty] == 0)
    assert np.all(np.isneginf(lse[empty]))
    assert np.all(np.isfinite(np.delete(lse, empty, axis=0)))


def test_bitwise_whatever_cannot_be_seen():
    case = make_case()
    out, lse = case.run()
    # Rows of the future, not written yet, behind the visible entries.
    longer = dataclasses.replace(case, entries=[[*entries, (28, 0, 5, 60, 0)] for entries in case.entries])
    # Other pages: one permutation of the pool.
    order = np.random.default_rng(1).permutation(PAGES)
    place = np.argsort(order)
    moved = dataclasses.replace(
        case,
        values=case.values[:, order],
        keys=case.keys[:, order],
        entries=[[(int(place[page]), *rest) for page, *rest in entries] for entries in case.entries],
    )
    # The other request's queries and a page that it alone reads, gone wrong; a query of the same request.
    query, position, values = case.query.copy(), case.position.copy(), case.values.copy()
    query[6:], position[6:10] = np.nan, 3
    query[2], position[2] = 100.0, 54
    values[LAYER, 27] = np.nan
    other = dataclasses.replace(case, query=query, position=position, values=values)
    kept = [0, 1, 4, 5]
    for changed in (longer, moved, other):
        changed_out, changed_lse = changed.run()
        np.testing.assert_array_equal(changed_out[kept], out[kept])
        np.testing.assert_array_equal(changed_lse[kept], lse[kept])
    assert not np.array_equal(changed_out[2], out[2])


def test_rows_are_seen():
    """The pair of the test above: a visible row moved by one position changes what sees it, and only that."""
    case = make_case()
    out, _ = case.run()
    entries = [list(entries) for entries in case.entries]
    page, begin, end, target, base = entries[0][1]
    entries[0][1] = (page, begin, end, target, base + 1)
    changed, _ = dataclasses.replace(case, entries=entries).run()
    assert np.abs(changed - out)[[0, 2, 4, 5]].max(axis=(1, 2)).min() > 1e-3
    np.testing.assert_array_equal(changed[[1, 6, 7, 8]], out[[1, 6, 7, 8]])
    keys = case.keys.copy()
    keys[LAYER, page, begin] = np.nan  # a row that went wrong is not a row that is not there
    assert np.isnan(dataclasses.replace(case, keys=keys).run()[0][[0, 2, 4, 5]]).all()


def test_page_order_within_tolerance():
    case = make_case()
    out, lse = case.run()
    reordered, reordered_lse = dataclasses.replace(case, entries=[entries[::-1] for entries in case.entries]).run()
    assert_close(reordered, out)
    assert_lse_close(reordered_lse, lse)


def test_temporary_memory_does_not_grow_with_the_pool():
    case = make_case()

    def attend(values, keys):
        return rotated_grouped_attention(
            jnp.asarray(case.query), jnp.asarray(case.position), jnp.asarray(case.offsets), values, keys, jnp.int32(1),
            case.table(), rotary_table(FREQUENCIES, interleaved=False, max_delta=8192), key_heads=3, scale=SCALE,
        )  # fmt: skip

    def temporary(pages):
        pool = jax.ShapeDtypeStruct((LAYERS, pages, ROWS, 3 * WIDTH), jnp.float32)
        return jax.jit(attend).lower(pool, pool).compile().memory_analysis().temp_size_in_bytes

    assert temporary(5000) == temporary(50)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"key_heads": 4}, "6 query heads do not divide among key_heads=4"),
        ({"key_heads": 2}, "rows of width 42 do not hold key_heads=2 heads of width 14"),
        ({"rotary": rotary_table(FREQUENCIES[:3], interleaved=False, max_delta=1024)}, "turns 6 values, a head has 14"),
    ],
)
def test_refuses_what_does_not_fit(override, message):
    case = make_case()
    arguments = {"key_heads": 3, "rotary": rotary_table(FREQUENCIES, interleaved=False, max_delta=1024)} | override
    with pytest.raises(ValueError, match=message):
        rotated_grouped_attention(
            jnp.asarray(case.query), jnp.asarray(case.position), jnp.asarray(case.offsets), jnp.asarray(case.values),
            jnp.asarray(case.keys), jnp.int32(0), case.table(), scale=SCALE, **arguments,
        )  # fmt: skip


def test_named_kernel_that_cannot_run_is_an_error():
    case = make_case()
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        rotated_grouped_attention(
            jnp.asarray(case.query), jnp.asarray(case.position), jnp.asarray(case.offsets), jnp.asarray(case.values),
            jnp.asarray(case.keys), jnp.int32(0), case.table(),
            rotary_table(FREQUENCIES, interleaved=False, max_delta=1024),
            key_heads=3, scale=SCALE, implementation="mosaic_gpu",
        )  # fmt: skip
