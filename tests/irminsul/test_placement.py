"""Where rows go: the layout of a prompt depends on its content alone, however much of it was stored before."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul import prefill as prefill_module
from irminsul.cache import CacheConfig, new_cache
from irminsul.compilation import count_compilations
from irminsul.compute import PackedBatch
from irminsul.placement import FRESH, assign, place
from irminsul.plan import EXACT
from irminsul.policies import get_policy
from irminsul.prefill import complete, pack_batch, prefill, propose
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import plan_of, prompts, random_tokens

LIMIT = 509
EXACT_ONLY = get_policy("irminsul", shifted="refuse")
CONFIG = CacheConfig(num_pages=397, page_size=13, max_prompt_tokens=LIMIT, max_new_tokens=31, chunking=SMALL_CHUNKS)


def tiles(request):
    """The page table without page ids: what attention steps over, in order."""
    return request.entries[:, 1:].tolist()


def pages_of_segments(content, length):
    """The canonical layout: each segment cut into pages, the last one part full."""
    begin, layout = 0, []
    for end in [*content.segment_ends.tolist()]:
        for start in range(begin, end, CONFIG.page_size):
            stop = min(start + CONFIG.page_size, end)
            layout.append([0, stop - start, start, start])
        begin = end
    assert begin == length
    return layout


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_law_2_warm_and_cold_runs_tile_attention_alike(data):
    """Prompts that share beginnings, and responses behind them: the page table of each is that of an empty cache."""
    cache = new_cache(CONFIG)
    tokens = data.draw(prompts(LIMIT))
    for _ in range(data.draw(st.integers(1, 5))):
        result = prefill(None, cache, tokens, EXACT_ONLY, new_tokens=data.draw(st.integers(0, 31)))
        cold = prefill(None, new_cache(CONFIG), tokens, "full")
        assert tiles(result.request) == tiles(cold.request)
        assert tiles(cold.request) == pages_of_segments(result.request.plan.content, len(tokens))
        response = random_tokens(data.draw(st.integers(0, 3)), data.draw(st.integers(0, len(result.request.slots))))
        cache = complete(result.cache, result.request, response)
        base = np.concatenate([tokens, response]) if data.draw(st.booleans()) else tokens
        kept = data.draw(st.integers(1, len(base)))
        tokens = np.concatenate([base[:kept], data.draw(prompts(LIMIT))])[:LIMIT]


def test_a_page_is_copied_once_and_only_where_a_stored_page_goes_on():
    tokens = random_tokens(0, 300)
    cache = new_cache(CONFIG)
    result = prefill(None, cache, tokens, "prefix")
    cache = complete(result.cache, result.request)
    content = result.request.plan.content
    cut = int(content.segment_ends[0])
    assert cut % 13  # the segment's last page is part full
    for length, copied in ((cut, 0), (cut - 1, (cut - 1) % 13), (cut + 1, 1), (26, 0), (27, 1)):
        other = np.concatenate([tokens[:length], (tokens[length:] + 1) % 211])
        plan = plan_of(None, cache, other, "prefix")
        assert (plan.bin_of_token == EXACT).sum() == length
        placement = place(cache.tree, plan, rotate=True)
        assert [page.copied_rows for page in placement.fresh if page.copied_rows] == ([copied] if copied else [])
        assert placement.fresh[0].copied_rows == copied


def test_assigned_pages_take_the_place_of_stand_ins():
    cache = new_cache(CONFIG)
    placement = place(cache.tree, plan_of(None, cache, random_tokens(0, 100)), rotate=True, extra_tokens=20)
    pages = np.arange(200, 200 + len(placement.fresh), dtype=np.int32)
    assigned = assign(placement, pages)
    assert (placement.entries[:, 0] <= FRESH).all()
    np.testing.assert_array_equal(assigned.entries[:, 0], FRESH - placement.entries[:, 0] + 200)
    np.testing.assert_array_equal(np.unique(assigned.write_page), np.unique(assigned.entries[:, 0]))
    parents = [page.parent for page in assigned.fresh]
    assert parents == [-1, *pages[:-1].tolist()]
    assert [page.begin for page in assigned.fresh[1:]] == [page.end for page in assigned.fresh[:-1]]
    assert assigned.fresh[-1].end == 120


def test_a_batch_says_the_same_in_one_array_or_two(monkeypatch):
    """Prompts that fill the first array and prompts that do not, by one program."""
    proposals = [propose(None, new_cache(CONFIG), random_tokens(seed, count)) for seed, count in ((0, 101), (1, 16))]

    def packed():
        return [pack_batch(one.cache, one.placement, one.request) for one in proposals]

    unpack = jax.jit(PackedBatch.unpacked)
    whole = packed()
    monkeypatch.setattr(prefill_module, "NEAR_TOKENS", 16)
    long, short = packed()
    assert whole[0].rest is None
    assert whole[0].flat.size - long.flat.size == long.rest.size == 5 * (LIMIT - 16)
    assert (np.asarray(long.rest)[1] >= 0).sum() == 101 - 16
    jax.tree.map(np.testing.assert_array_equal, unpack(short), whole[1].unpacked())
    with count_compilations() as compiled:
        found = unpack(long)
    assert compiled.programs == 0
    jax.tree.map(np.testing.assert_array_equal, found, whole[0].unpacked())
    assert packed()[1].rest is short.rest  # on the device already
