"""The vectorised layout equals the host's builder: fresh pages, slots, copies and page tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul import device_placement
from irminsul.cache import CacheConfig, open_namespace
from irminsul.cache_key import request_key
from irminsul.content import read_content
from irminsul.device_cache import to_device
from irminsul.device_plan import DeviceContent, DevicePlan
from irminsul.device_tree import Trail
from irminsul.engine import Engine
from irminsul.placement import assign, place
from irminsul.plan import plan_prompt
from irminsul.policies import get_policy
from tests.irminsul.test_device_turn import CAPACITY, LAYOUT, SHORT_REUSE, random_session

CONFIG = CacheConfig(num_pages=211, **LAYOUT)


def as_device_plan(plan):
    """A plan of the host, token by token."""
    page, row = np.full((2, CAPACITY), 10**6, np.int32)
    starts_span = np.zeros(CAPACITY, bool)
    exact_end = 0
    for span in plan.spans:
        starts_span[span.begin] |= not span.computed
        exact_end = span.end if span.exact else exact_end
        for piece in span.pieces:
            held = slice(piece.position, piece.position + piece.row_end - piece.row_begin)
            page[held], row[held] = piece.page, np.arange(piece.row_begin, piece.row_end)
    bins = np.full(CAPACITY, -1, np.int8)
    bins[: plan.length] = plan.bin_of_token
    return jax.tree.map(jnp.asarray, DevicePlan(bins, np.int32(exact_end), Trail(page, row), starts_span))


def as_device_content(content):
    """The parts of a prompt's content that placement reads."""
    starts_segment = np.zeros(CAPACITY + 1, bool)
    starts_segment[content.segment_ends[:-1]] = True
    fields = dict.fromkeys(DeviceContent._fields)
    tokens = np.zeros(CAPACITY, np.int32)
    return DeviceContent(**fields)._replace(tokens=tokens, starts_segment=jnp.asarray(starts_segment[:-1]))


@pytest.mark.parametrize("name", ["irminsul", "naive", "prefix"])
def test_placement_equals_the_hosts(name):
    policy = get_policy(name, **SHORT_REUSE)
    engine = Engine.create(None, CONFIG, policy)
    key = request_key(engine.cache, None, "default", "", policy.bitwise)
    engine.cache, owner = open_namespace(engine.cache, key)
    pages = np.random.default_rng(1).permutation(CONFIG.num_pages).astype(np.int32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def laid_out(tree, plan, content, length):
        placement = device_placement.place(tree, plan, content, CONFIG, policy)
        page_of = device_placement.page_of_token(plan, placement, jnp.asarray(pages[: placement.begin.shape[0]]))
        table, entries = device_placement.page_table(placement, page_of, length, CONFIG.table_entries)
        return placement, page_of, device_placement.parents(tree, placement, page_of), table, entries

    copies = moved = 0
    for prompt in random_session(7, 17):
        content = read_content(prompt.astype(np.int32), CONFIG.chunking, key)
        plan = plan_prompt(
            engine.cache.tree, engine.cache.registry, content, owner, policy, CONFIG.chunking.anchor_window
        )
        host = assign(place(engine.cache.tree, plan, rotate=policy.rotate), pages)
        device, page_of, parents, table, entries = laid_out(
            to_device(engine.cache).tree, as_device_plan(plan), as_device_content(content), jnp.int32(len(prompt))
        )
        need = len(host.fresh)
        assert device.need == need
        records = np.stack([*parents, device.begin, device.end], axis=1)[:need]
        np.testing.assert_array_equal(records, [(f.parent, f.parent_end, f.begin, f.end) for f in host.fresh])
        assert (device.copied_from, device.copied_rows) == (host.fresh[0].copied_from, host.fresh[0].copied_rows)
        np.testing.assert_array_equal(np.flatnonzero(device.computed), host.positions)
        np.testing.assert_array_equal(page_of[host.positions], host.write_page)
        np.testing.assert_array_equal(device.row[host.positions], host.write_row)
        rows = np.stack(jax.tree.leaves(table), axis=-1)[0]
        assert entries == len(host.entries)
        np.testing.assert_array_equal(rows[: len(host.entries)], host.entries)
        np.testing.assert_array_equal(rows[len(host.entries) :], 0)
        copies += bool(device.copied_rows)
        moved += int((host.entries[:, 3] != host.entries[:, 4]).sum())
        engine.serve(prompt)
    assert copies > 0
    assert (moved > 0) == (name == "irminsul")
