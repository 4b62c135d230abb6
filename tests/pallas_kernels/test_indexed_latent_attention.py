"""Sparse latent attention against a float64 loop over rows: ranking, choice, output, log-sum-exp and reach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexed_latent_attention.reference import indexed_latent_attention, select_rows
from pallas_kernels.page_table import page_table_from_array
from pallas_kernels.rotary import rotary_table
from tests.tolerances import assert_close

LAYERS, INDEXED, PAGES, SIZE, LATENT, ROPE, HEADS = 3, 2, 7, 5, 11, 6, 2
INDEX_HEADS, INDEX_WIDTH, COUNT = 3, 8, 7
DISTANCES = (2, 9)
FREQUENCIES = np.array([0.9, 0.31, 0.07])
# Of each request: page, rows, and where the first of them stands and was computed.
TABLES = np.array(
    [
        [(3, 0, 5, 0, 0), (1, 1, 4, 9, 2), (6, 2, 2, 0, 0), (5, 0, 3, 5, 40)],
        [(2, 2, 5, 0, 17), (0, 0, 4, 3, 3), (4, 1, 5, 7, 7), (6, 0, 0, 0, 0)],
    ],
    np.int32,
)


def turned(x, delta, interleaved):
    """``R(delta)`` of the first values, in float64."""
    x, cos, sin = np.array(x, np.float64), np.cos(delta * FREQUENCIES), np.sin(delta * FREQUENCIES)
    half = (slice(0, ROPE, 2), slice(1, ROPE, 2)) if interleaved else (slice(0, ROPE // 2), slice(ROPE // 2, ROPE))
    first, second = x[..., half[0]].copy(), x[..., half[1]].copy()
    x[..., half[0]], x[..., half[1]] = first * cos - second * sin, second * cos + first * sin
    return x


@pytest.fixture(scope="module")
def problem():
    draw = np.random.default_rng(0)
    pages = {
        "latent": draw.standard_normal((LAYERS, PAGES, SIZE, LATENT)),
        "rope": draw.standard_normal((LAYERS, PAGES, SIZE, ROPE)),
        "index": draw.standard_normal((INDEXED, PAGES, SIZE, INDEX_WIDTH)),
    }
    seen = np.zeros((PAGES, SIZE), bool)
    for page, begin, end, *_ in TABLES.reshape(-1, 5):
        seen[page, begin:end] = True
    for array in pages.values():
        array[:, ~seen] = np.nan
    tokens = 5
    return {
        "pages": pages,
        "position": np.array([11, 4, -1, 10, 2]),
        "offsets": np.array([0, 3, 5]),
        "q_latent": draw.standard_normal((tokens, HEADS, LATENT)),
        "q_rope": draw.standard_normal((tokens, HEADS, ROPE)),
        "query": draw.standard_normal((tokens, INDEX_HEADS, INDEX_WIDTH)),
        "weights": draw.standard_normal((tokens, INDEX_HEADS)),
    }


def expected(problem, token, storage):
    """Output, log-sum-exp and reach of one query: rows in view, the highest of them, softmax over those."""
    request = int(np.searchsorted(problem["offsets"][1:], token, side="right"))
    rows = []
    for page, begin, end, target, base in TABLES[request]:
        for row in range(begin, end):
            position = target + row - begin
            if position <= problem["position"][token]:
                delta = target - base if storage == "base" else position
                latent, rope, index = (
                    problem["pages"][name][layer, page, row]
                    for name, layer in (("latent", 2), ("rope", 2), ("index", 1))
                )
                key = turned(index, delta, interleaved=False)
                score = problem["weights"][token] @ np.maximum(problem["query"][token] @ key, 0)
                rows.append((score, position, latent, turned(rope, delta, interleaved=True)))
    rows = sorted(rows, key=lambda row: (-row[0], row[1]))[:COUNT]
    position = np.array([row[1] for row in rows])
    latent, rope = np.array([row[2] for row in rows]), np.array([row[3] for row in rows])
    scores = 0.3 * (problem["q_latent"][token] @ latent.T + problem["q_rope"][token] @ rope.T)
    weights = np.exp(scores)
    far = (problem["position"][token] - position[:, None] >= np.array(DISTANCES)) & (position > 0)[:, None]
    total = weights.sum(-1, keepdims=True)
    return weights @ latent / total, np.log(total[:, 0]), weights @ far / total, sorted(position)


@pytest.mark.parametrize("storage", ["base", "unrotated"])
def test_two_requests_against_a_loop(problem, storage):
    table = page_table_from_array(TABLES)
    main, own = (rotary_table(FREQUENCIES, interleaved=kind, max_delta=1024) for kind in (True, False))
    pages = {name: jnp.asarray(array, jnp.float32) for name, array in problem["pages"].items()}
    operands = {
        name: jnp.asarray(problem[name], jnp.float32) for name in ("q_latent", "q_rope", "query", "weights")
    } | {name: jnp.asarray(problem[name], jnp.int32) for name in ("position", "offsets")}

    @jax.jit
    def run(pages, at):
        chosen = select_rows(
            at["query"], at["weights"], at["position"], at["offsets"], pages["index"], jnp.int32(1), table, own,
            count=COUNT, storage=storage,
        )  # fmt: skip
        return chosen, indexed_latent_attention(
            at["q_latent"], at["q_rope"], at["position"], at["offsets"], chosen, pages["latent"], pages["rope"],
            jnp.int32(2), table, main, scale=0.3, storage=storage, distances=DISTANCES,
        )  # fmt: skip

    chosen, (out, lse, reach) = run(pages, operands)
    for token in (0, 1, 3, 4):
        wanted = expected(problem, token, storage)
        for found, value in zip((out, lse, reach), wanted, strict=False):
            assert_close(found[token], value)
        used = np.asarray(chosen.row[token])[np.isfinite(chosen.score[token])]
        request = int(token >= 3)
        entry = TABLES[request][used // SIZE]
        places = entry[:, 3] + used % SIZE - entry[:, 1]
        assert places.tolist() == wanted[3]  # the highest, in order of position
        assert len(places) == min(COUNT, problem["position"][token] + 1)
    assert not out[2].any()  # padding sees nothing
    assert lse[2].tolist() == [-np.inf] * HEADS
