"""The Hopper kernel without a GPU: tiling of queries, the interpreter with its race detector, lowering to CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_table import PageTable
from pallas_kernels.rotated_latent_attention import api, hopper, hopper_rows, hopper_schedule, reference
from pallas_kernels.rotated_latent_attention.hopper_merge import merge_splits
from pallas_kernels.rotated_latent_attention.hopper_splits import MULTIPROCESSORS, tuned_splits
from pallas_kernels.rotated_latent_attention.tiles import TILE_ROWS, pack, split_pairs, tile_queries, unpack
from tests.pallas_kernels.latent_oracle import oracle, random_problem
from tests.tolerances import assert_close

# One small program in place of dozens of single operations.
tiled = jax.jit(tile_queries, static_argnames=("heads", "rows"))
packed_tiles, shared_pairs = jax.jit(pack), jax.jit(split_pairs, static_argnums=2)
unpacked = jax.jit(unpack, static_argnums=(2, 3))


@pytest.mark.parametrize(
    ("heads", "queries"), [(1, (131,)), (8, (7, 0, 13)), (16, (1, 1, 1)), (16, (37,)), (64, (3, 2)), (128, (5,))]
)
def test_every_query_row_stands_in_one_tile_of_its_request(heads, queries):
    tokens = sum(queries)
    offsets = np.cumsum([0, *queries])
    position = jnp.arange(tokens, dtype=jnp.int32) + 100
    tiles = tiled(position, jnp.asarray(offsets, jnp.int32), heads)
    marks = jnp.arange(tokens * heads, dtype=jnp.float32).reshape(tokens, heads, 1)
    packed = packed_tiles(tiles, marks)
    assert packed.shape[1:] == (TILE_ROWS, 1)
    assert np.array_equal(unpacked(tiles, packed, tokens, -1.0), marks)
    fields = tiles.request, tiles.row, packed[..., 0], tiles.position
    for request, begin, rows, places in zip(*map(np.asarray, fields), strict=True):
        assert np.array_equal(rows[places >= 0], begin + np.flatnonzero(places >= 0))
        token = rows[places >= 0] // heads
        assert np.all((token >= offsets[request]) & (token < offsets[request + 1]))
        assert np.array_equal(token + 100, places[places >= 0])
    # No request's tiles are more than part full but for its last.
    assert packed.shape[0] <= max(1, heads // 64) * (tokens * min(heads, 64) // 64 + len(queries))


@pytest.mark.parametrize("heads", [8, 32])
def test_one_token_a_tile_stays_where_it_is(heads):
    position = jnp.asarray([7, 3, 5, 9, 11], jnp.int32)
    tiles = tiled(position, jnp.asarray([1, 1, 3, 4], jnp.int32), heads, rows=heads)
    assert np.array_equal(tiles.token[:, 0], [-1, 1, 2, 3, -1])
    assert np.array_equal(tiles.last, [-1, 3, 5, 9, -1])
    assert np.array_equal(np.asarray(tiles.request)[1:4], [1, 1, 2])
    marks = jnp.arange(5 * heads * 2, dtype=jnp.float32).reshape(5, heads, 2)
    assert np.array_equal(unpacked(tiles, packed_tiles(tiles, marks), 5, -1.0), marks)


def test_a_tile_knows_its_least_and_greatest_position():
    position = jnp.asarray([31, 32, 33, -1, 35], jnp.int32)
    tiles = tiled(position, jnp.asarray([0, 5], jnp.int32), 16)
    # The token at -1 is padding that stands in a tile; the three missing tokens of the second tile are in none.
    assert np.array_equal(tiles.first, [-1, 35])
    assert np.array_equal(tiles.last, [33, 35])


def test_splits_fill_the_device_once():
    for tiles, entries in ((1, 64), (16, 257), (128, 64), (129, 9999), (2048, 512)):
        splits = tuned_splits(tiles, entries)
        assert splits == 1 or tiles * splits <= MULTIPROCESSORS
    assert tuned_splits(1, 7) == 1 < tuned_splits(1, 64) <= tuned_splits(1, 9999)


def test_tokens_of_no_request_stand_in_no_tile():
    tiles = tiled(jnp.arange(9, dtype=jnp.int32), jnp.asarray([2, 5, 7], jnp.int32), 16)
    assert sorted(int(x) for x in np.unique(tiles.token)) == [-1, 2, 3, 4, 5, 6]
    assert np.all(unpacked(tiles, jnp.ones((*tiles.position.shape, 1)), 9, -2.0)[np.asarray([0, 1, 7, 8])] == -2)


def test_heads_that_do_not_fill_tiles_are_refused():
    with pytest.raises(NotImplementedError, match="24 heads neither divide 64 nor"):
        tile_queries(jnp.arange(3, dtype=jnp.int32), jnp.asarray([0, 3], jnp.int32), 24)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_splits_share_the_visible_pairs(splits):
    target = np.arange(22)[None] * 64
    fields = [0 * target, 0 * target, 0 * target + 64, target, target]
    table = PageTable(*(jnp.asarray(field, jnp.int32) for field in fields))
    for position, pairs in ((0, 1), (127, 1), (128, 2), (5000, 11), (-1, 0)):
        tiles = tiled(jnp.asarray([position], jnp.int32), jnp.asarray([0, 1], jnp.int32), 64)
        bounds = np.asarray(shared_pairs(tiles, table, splits))[0]
        assert (bounds[0], bounds[-1], len(bounds)) == (0, pairs, splits + 1)
        assert np.all(np.diff(bounds) <= -(-pairs // splits))
        assert np.all(np.diff(bounds) >= 0)


def test_records_say_what_the_table_says():
    """The same rows at the same positions in copies that begin anywhere, which read no eight rows too many."""
    last, begin = (x.astype(np.int32).reshape(2, -1) for x in np.tril_indices(64))
    begin, end = (np.pad(x, ((0, 0), (0, 1))) for x in (begin, last + 1))  # every range, and padding
    used = begin < end
    page, origin, delta = (np.where(used, x, 0) for x in (7 + begin, 3 * end - 90, (begin + end) // 9))
    records = jax.jit(hopper_schedule.entry_records)(*map(jnp.asarray, (page, begin, end, origin, delta)))
    assert records.shape == (2, begin.shape[1] + hopper_schedule.SPARE_RECORDS, 4)
    page_id, word, first = jnp.moveaxis(records[:, : begin.shape[1], :3], -1, 0)
    start = hopper_schedule.copied_from(word, whole=False)
    low, high, row_zero = hopper_schedule.seen_rows(word, first, whole=False)
    assert np.all(start % 8 == 0)
    assert np.all((low >= 0) & (high <= 64))
    assert np.array_equal(page_id, page)
    assert np.array_equal((low + start)[used], begin[used])
    assert np.array_equal((high + start)[used], end[used])
    assert np.array_equal(row_zero - start, origin)
    read = np.minimum(start + 64, 64) - np.maximum(start, 0)
    assert np.all(read <= 7 + np.minimum(end, 64 - begin) * used)
    assert not np.any(read[~used])
    assert np.array_equal(hopper_schedule.seen_rows(word, first, whole=True), (begin, end, origin))
    assert np.array_equal(hopper_schedule.partly_seen(word), (begin > 0) | (end < 64))
    turns = np.diff(delta, axis=1) != 0
    assert np.array_equal(hopper_schedule.turns(word)[:, 1:], turns)
    assert np.array_equal(hopper_schedule.turns_behind(word)[:, :-1], turns)


def test_merge_is_one_softmax(capfd):
    """More splits than are in flight at once, rows that some splits or all of them see nothing of, tokens nowhere."""
    splits, tiles, heads, width = 19, 2, 2, 128
    rng = np.random.default_rng(1)
    lse = rng.standard_normal((splits, tiles, 2 * heads)).astype(np.float32) * 9
    out = rng.standard_normal((*lse.shape, width)).astype(np.float32)
    lse[:, 0, 1], lse[5:, 1, 0] = -np.inf, -np.inf
    place = jnp.asarray([3, -1, 0, 2], jnp.int32)
    merged, total = merge_splits(
        jnp.asarray(out), jnp.asarray(lse), place, heads=heads, dtype=jnp.dtype("float32"), interpret=True
    )
    assert "RACE" not in capfd.readouterr().out
    with np.errstate(divide="ignore"):
        expected_total = np.log(np.exp(lse.astype(np.float64)).sum(axis=0))
    weights = np.exp(lse - np.where(np.isinf(expected_total), 0, expected_total))
    expected = (weights[..., None] * out).sum(axis=0).reshape(-1, heads, width)
    expected_total = expected_total.reshape(-1, heads)
    for token, at in enumerate((3, None, 0, 2)):
        if at is None or token == 2:
            assert np.all(np.isinf(total[token, slice(None) if at is None else 1]))
            assert not np.any(merged[token, slice(None) if at is None else 1])
        if at is not None:
            assert_close(merged[token], expected[at])
            seen = np.isfinite(expected_total[at])
            assert_close(total[token, seen], expected_total[at, seen])


@pytest.mark.parametrize(
    ("heads", "width", "rows", "queries", "splits", "interleaved"),
    [
        (16, 128, (203, 40, 0), (1, 1, 1), 2, True),
        (64, 128, (131,), (2,), 1, False),
        (32, 512, (140, 30), (3, 0), 1, True),
    ],
    ids=["columns", "rows", "stages"],
)
def test_interpreted_kernels_against_the_oracle(heads, width, rows, queries, splits, interleaved, capfd):
    """Partial pages, many distances, NaN everywhere else; no two warpgroups touch a buffer out of order."""
    problem = random_problem(
        3, heads=heads, rows=rows, queries=queries, latent_width=width, rope_width=64, page_size=64, num_pages=29,
        interleaved=interleaved, dtype="bfloat16",
    )  # fmt: skip
    settings = {"scale": problem.scale, "splits": splits, "interpret": True}
    if heads == 64:
        settings["distances"] = (7, 32, 64)
        out, lse, shares = hopper.rotated_latent_attention_with_reach(*problem.arguments(), **settings)
    else:
        out, lse = hopper.rotated_latent_attention(*problem.arguments(), **settings)
    assert "RACE" not in capfd.readouterr().out
    expected_out, expected_lse = oracle(problem)
    out, lse = np.asarray(out, np.float64), np.asarray(lse)
    assert np.linalg.norm(out - expected_out) < 2.5e-3 * np.linalg.norm(expected_out)
    assert_close(out, expected_out, "bfloat16")
    seen = np.isfinite(expected_lse)
    assert np.array_equal(seen, np.isfinite(lse))
    assert_close(lse[seen], expected_lse[seen], atol=1e-3)
    assert not np.any(out[~seen])
    if heads == 64:
        measure = partial(reference.rotated_latent_attention, distances=settings["distances"])
        measured = jax.jit(partial(measure, scale=problem.scale))(*problem.arguments())
        assert_close(shares, measured[2], atol=1e-3, rtol=0)
        assert 0.1 < float(jnp.max(shares[..., 2])) < float(jnp.max(shares[..., 0]))


def test_the_race_detector_sees_missing_barriers(monkeypatch, capfd):
    """Warpgroups that do not wait for each other's weights do not pass."""
    monkeypatch.setattr(hopper_rows, "_announce", lambda weights: None)
    monkeypatch.setattr(hopper_rows, "_wait_for", lambda weights: None)
    problem = random_problem(
        3, heads=64, rows=(131,), queries=(1,), latent_width=128, rope_width=64, page_size=64, dtype="bfloat16"
    )
    jax.block_until_ready(hopper.rotated_latent_attention(*problem.arguments(), scale=problem.scale, interpret=True))
    assert "RACE DETECTED" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("heads", "queries", "width", "options"),
    [
        (8, 1, 512, {"interleaved": False}),
        (16, 1, 512, {"splits": 4}),
        (32, 1, 256, {"rotate": False}),
        (16, 5, 512, {"splits": 4}),
        (64, 1, 256, {}),
        (128, 1, 512, {"rotate": False}),
        (128, 2, 512, {"interleaved": False}),
    ],
)
def test_lowers_for_cuda(heads, queries, width, options):
    """Layouts fit and shared memory suffices; the layer and the table stay dynamic."""
    options = dict(options)
    problem = random_problem(
        5, heads=heads, rows=(71, 5), queries=(queries, 1), latent_width=width, rope_width=64, page_size=64,
        dtype="bfloat16", interleaved=options.pop("interleaved", True),
    )  # fmt: skip
    attend = jax.jit(partial(hopper.rotated_latent_attention, scale=problem.scale, **options))
    lowered = attend.trace(*problem.arguments()).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in lowered


def test_nothing_named_takes_the_kernel_where_it_can(monkeypatch):
    """On a Hopper GPU: bfloat16 rows go to the kernel, float32 rows to XLA unless the kernel is named."""
    monkeypatch.setattr(api, "hopper_available", lambda: True)
    monkeypatch.setattr(hopper, "plan", lambda *_, **__: None)
    mark = jnp.full((11, 16, 128), 7.0, jnp.bfloat16)
    monkeypatch.setattr(hopper, "attend", lambda *_, **__: (mark, jnp.zeros((11, 16), jnp.float32)))
    shape = {"heads": 16, "latent_width": 128, "rope_width": 64, "page_size": 64}
    problems = [random_problem(1, **shape, dtype=dtype) for dtype in ("bfloat16", "float32")]
    attend = api.rotated_latent_attention
    assert attend(*problems[0].arguments(), scale=1.0)[0] is mark
    assert attend(*problems[0].arguments(), scale=1.0, implementation="xla")[0] is not mark
    out, _ = attend(*problems[1].arguments(), scale=problems[1].scale)
    assert_close(out, oracle(problems[1])[0])
    with pytest.raises(NotImplementedError, match="queries of float32"):
        attend(*problems[1].arguments(), scale=1.0, implementation="mosaic_gpu")


def test_reach_is_measured_by_the_kernels_where_they_can(monkeypatch):
    """On a Hopper GPU, bfloat16 rows: by the kernel; what it does not take, and everything elsewhere: in XLA."""
    mark = (jnp.full((11, 16, 128), 7.0, jnp.bfloat16), jnp.zeros((11, 16)), jnp.zeros((11, 16, 1)))
    monkeypatch.setattr(hopper, "rotated_latent_attention_with_reach", lambda *_, **__: mark)
    shape = {"heads": 16, "latent_width": 128, "rope_width": 64, "page_size": 64}
    problems = {dtype: random_problem(1, **shape, dtype=dtype) for dtype in ("bfloat16", "float32")}

    def measure(dtype, **options):
        settings = {"scale": 1.0, "distances": (7,), **options}
        return api.rotated_latent_attention(*problems[dtype].arguments(), **settings)

    elsewhere = measure("bfloat16")
    assert elsewhere[0] is not mark[0]
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu.*is not available on 'cpu'.*use implementation='xla'"):
        measure("bfloat16", implementation="mosaic_gpu")
    monkeypatch.setattr(api, "hopper_available", lambda: True)
    assert measure("bfloat16") is mark
    assert measure("bfloat16", implementation="xla")[0] is not mark[0]
    assert measure("float32")[0] is not mark[0]


def test_shapes_the_kernel_does_not_take_are_refused():
    def attend(storage="base", **change):
        shape = {"heads": 16, "latent_width": 128, "rope_width": 64, "page_size": 64, "dtype": "bfloat16"}
        problem = random_problem(1, **(shape | change))
        hopper.rotated_latent_attention(*problem.arguments(), scale=1.0, storage=storage, interpret=True)

    for change, reason in (
        ({"storage": "unrotated"}, "storage='unrotated'"),
        ({"page_size": 32}, "pages of 32 rows; it takes 64"),
        ({"rope_width": 32}, "rotary width 32; it takes 64"),
        ({"latent_width": 64}, "latent width 64"),
        ({"dtype": "float32"}, "queries of float32"),
        ({"heads": 24}, "24 heads; it takes 8, 16, 32 and multiples of 64"),
        ({"heads": 4}, "4 heads"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='xla'"):
            attend(**change)
