"""The cost of both forms, against what the compiler counts, and the shapes that others share."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotated_latent_attention.api import rotated_latent_attention
from pallas_kernels.rotated_latent_attention.arg_specs import DECODE, EXTEND, SMALL, arguments, entries
from pallas_kernels.rotated_latent_attention.attention_cost import absorbed_flops, expanded_flops
from tests.pallas_kernels.latent_oracle import Problem, oracle
from tests.tolerances import assert_close

WIDTHS = {"heads": 8, "latent_width": 512, "key_width": 64, "value_width": 64, "rope_width": 64}


def compiled_flops(products):
    """What XLA counts for a list of einsums over shapes."""

    def compute(operands):
        return [jnp.einsum(spec, *pair) for (spec, *_), pair in zip(products, operands, strict=True)]

    operands = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes) for _, *shapes in products]
    return jax.jit(compute).lower(operands).compile().cost_analysis()["flops"]


def test_counts_are_those_of_the_products():
    m, n, h, c, k, v, r = 5, 7, 3, 11, 13, 17, 19
    widths = {"heads": h, "latent_width": c, "key_width": k, "value_width": v, "rope_width": r}
    absorbed = [
        ("MHK,HKC->MHC", (m, h, k), (h, k, c)),
        ("MHC,NC->MHN", (m, h, c + r), (n, c + r)),
        ("MHN,NC->MHC", (m, h, n), (n, c)),
        ("MHC,HCV->MHV", (m, h, c), (h, c, v)),
    ]
    expanded = [
        ("NC,HKC->HNK", (n, c), (h, k, c)),
        ("NC,HCV->HNV", (n, c), (h, c, v)),
        ("MHK,HNK->MHN", (m, h, k + r), (h, n, k + r)),
        ("MHN,HNV->MHV", (m, h, n), (h, n, v)),
    ]
    assert absorbed_flops(m, n, **widths) == compiled_flops(absorbed)
    assert expanded_flops(m, n, **widths) == compiled_flops(expanded)


def test_many_queries_are_cheaper_expanded():
    def expanded_wins(queries, rows, **widths):
        return expanded_flops(queries, rows, **widths) < absorbed_flops(queries, rows, **widths)

    assert [expanded_wins(queries, 10**9, **WIDTHS) for queries in (1, 73, 74, 2048)] == [False, False, True, True]
    wider = {**WIDTHS, "key_width": 128, "value_width": 128}
    assert [expanded_wins(queries, 10**9, **wider) for queries in (170, 171)] == [False, True]
    assert expanded_wins(64, 64, **WIDTHS)  # few rows: absorbing W_UK into every query does not pay


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_small_specs_against_the_oracle(spec):
    args = arguments(spec)
    table, offsets = args["page_table"], np.asarray(args["query_offsets"])
    columns = (table.page_id, table.row_begin, table.row_end, table.target_position, table.base_position)
    rows = np.stack([np.asarray(column) for column in columns], axis=-1)
    problem = Problem(
        **{name: np.asarray(args[name]) for name in ("q_latent", "q_rope", "latent_pages", "rope_pages")},
        query_position=np.asarray(args["query_position"]),
        query_offsets=offsets,
        layer=1,
        entries=tuple(tuple(tuple(int(x) for x in entry) for entry in request) for request in rows),
        capacity=rows.shape[1],
        frequencies=10000.0 ** (-np.arange(spec.rope_width // 2) / (spec.rope_width // 2)),
        interleaved=True,
        scale=args["scale"],
    )
    attend = jax.jit(partial(rotated_latent_attention, scale=args.pop("scale")))
    for actual, expected in zip(attend(**args), oracle(problem), strict=True):
        assert_close(actual, expected)


def test_specs_say_what_they_cost():
    assert len({spec.name for spec in DECODE + EXTEND + SMALL}) == len(DECODE + EXTEND + SMALL)
    decode = DECODE[-1]
    assert decode.flops == 2 * 128 * 128 * 16384 * (576 + 512)
    assert decode.row_bytes == 128 * 16384 * 576 * 2
    spec = EXTEND[0]
    visible = sum(spec.kv_length - spec.query_tokens + i + 1 for i in range(spec.query_tokens))
    assert spec.flops == 2 * 16 * visible * (576 + 512)


@pytest.mark.parametrize("spec", DECODE + EXTEND + SMALL, ids=lambda spec: spec.name)
def test_specs_cover_each_position_once(spec):
    listed = entries(spec)
    covered = np.concatenate([target + np.arange(end - begin) for begin, end, target, _ in listed])
    assert np.array_equal(covered, np.arange(spec.kv_length))
    deltas = [delta for *_, delta in listed]
    changes = sum(one != other for one, other in pairwise(deltas))
    expected = {"none": 0, "every_8_pages": (len(listed) - 1) // 8, "every_page": len(listed) - 1}
    assert changes == expected[spec.delta_pattern]
