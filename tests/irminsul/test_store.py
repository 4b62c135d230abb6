"""Tiers below the pool: what comes back is what was kept, for whom it was kept, and stands where its path says."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irminsul.cache import new_cache
from irminsul.cache_key import request_key
from irminsul.compilation import count_compilations
from irminsul.page_tree import FREE
from irminsul.policies import get_policy
from irminsul.pool import new_pool
from irminsul.prefill import complete, prefill
from irminsul.sources import Sources
from irminsul.store import Store
from irminsul.store_backend import Backend, HostTier, StoreLockedError
from irminsul.store_transfer import gather_pages, page_rows, scatter_pages, start_gather, write_pages
from models import families
from tests.irminsul.conftest import TINY_MLA
from tests.irminsul.serving import assert_same_bits, random_tokens, serve
from tests.irminsul.storing import assert_links_are_whole, change, keys_of, memory_store, serve_stored

PROMPT = random_tokens(0, 401)


@pytest.fixture(scope="module")
def empty(model, config):
    return lambda pages=config.num_pages: new_cache(dataclasses.replace(config, num_pages=pages), model.row_format)


@pytest.fixture(scope="module")
def cold(model, empty):
    """What a cache without a store answers to the prompt."""
    return serve(model, empty(), PROMPT)


@pytest.fixture(scope="module")
def kept(model, config, empty):
    """A store that holds the prompt, closed."""
    kv = memory_store()
    with Store(kv, model, config) as store:
        serve_stored(model, store, empty(), PROMPT)
    return kv


@pytest.mark.parametrize("host_bytes", [0, 2**30])
def test_exact_hits_survive_a_restart_bit_for_bit(model, config, empty, cold, kept, host_bytes):
    with Store(kept, model, config, write=False, host_bytes=host_bytes) as store:
        first = serve_stored(model, store, empty(), PROMPT)
        again = serve_stored(model, store, empty(), PROMPT)
    for served in (first, again):
        assert served.bins["exact"] == len(PROMPT) - 1
        assert_same_bits(served, cold)
    pages = len(keys_of(kept, "rows"))
    assert (store.metrics.stored_hits, store.metrics.host_hits) == ((pages, pages) if host_bytes else (2 * pages, 0))
    assert not store.metrics.misses


def test_shifted_rows_come_back_where_the_prompt_needs_them(model, config, empty, kept):
    moved = np.concatenate([random_tokens(1, 17), PROMPT[60:330]])
    with Store(kept, model, config, write=False) as store:
        served = serve_stored(model, store, empty(), moved)
        resident = serve(model, served.cache, moved)
    assert served.bins["shifted"] > 200
    assert store.metrics.stored_hits < len(keys_of(kept, "rows"))  # and no others
    pool = serve(model, serve(model, empty(), PROMPT).cache, moved)
    np.testing.assert_array_equal(served.computed, pool.computed)
    np.testing.assert_array_equal(served.logits, pool.logits)
    assert resident.bins["exact"] > 0


def test_pages_evicted_from_the_pool_are_served_from_the_tier(model, config, cold):
    """A pool that holds one prompt at a time: without a store the first is gone, with one it is not."""
    others = [random_tokens(seed, 401) for seed in (2, 3)]
    kv = memory_store()
    with Store(kv, model, config) as store:
        cache = new_cache(dataclasses.replace(config, num_pages=43), model.row_format)
        for tokens in (PROMPT, *others):
            cache = serve_stored(model, store, cache, tokens).cache
        assert serve(model, cache.copy(), PROMPT).bins["exact"] == 0
        served = serve_stored(model, store, cache, PROMPT)
        assert served.bins["exact"] == len(PROMPT) - 1
        assert store.metrics.host_hits > 0
        assert_same_bits(served, cold)
        assert_links_are_whole(served.cache)


def test_a_prompt_is_loaded_as_far_as_the_pool_has_room(model, config, kept):
    """Fragments of many pages, of which other requests leave too few: what does not fit is computed."""
    fragments = [PROMPT[begin : begin + 66] for begin in (320, 250, 180, 110, 40)]
    for taken in (0, 14):
        with Store(kept, model, config, write=False) as store:
            cache = new_cache(dataclasses.replace(config, num_pages=43), model.row_format)
            cache = serve_stored(model, store, cache, random_tokens(4, 301)).cache
            cache.in_flight[np.flatnonzero(cache.tree.namespace >= 0)[:taken]] += 1
            served = serve_stored(model, store, cache, np.concatenate(fragments))
        assert (store.metrics.misses["room"] > 0) == (taken > 0)
        assert (served.bins["shifted"] > 150) == (taken == 0)
        assert np.isfinite(served.logits).all()


def test_a_page_whose_ancestors_are_not_loaded_is_shifted_only(model, config, empty, kept):
    kv = memory_store()
    for key in keys_of(kept):
        kv.write(key, kept.read(key).result().value).result()
    with Store(kv, model, config) as store:
        serve_stored(model, store, empty(), PROMPT[:20])
        root = [entry for entry in store._catalog.entries.values() if entry.record.base_position == 0]
        assert len(root) == 1
        store.delete([root[0].name])
        store.flush()
        served = serve_stored(model, store, empty(), PROMPT, "prefix")
        assert served.bins["exact"] == 0
        served = serve_stored(model, store, empty(), PROMPT)
        assert served.bins["exact"] == 0
        assert served.bins["shifted"] > 300
        # The root page has been computed and kept again: its children find their context, in the pool and in the store.
        again = serve_stored(model, store, served.cache, PROMPT)
        assert again.bins["exact"] > 0
    with Store(kv, model, config, write=False) as store:
        again = serve_stored(model, store, empty(), PROMPT)
        assert again.bins["exact"] > 0
        assert_links_are_whole(again.cache)


def test_a_tenant_never_reads_anothers_objects(model, config, empty, monkeypatch):
    kv = memory_store()
    read = []
    start_read = Backend.start_read
    monkeypatch.setattr(Backend, "start_read", lambda self, key: (read.append(key), start_read(self, key))[1])
    with Store(kv, model, config) as store:
        serve_stored(model, store, empty(), PROMPT, namespace="alice")
        store.flush()
        theirs = {key.split("/")[0] for key in keys_of(kv)}
        assert len(theirs) == 1
        other = serve_stored(model, store, empty(), PROMPT, namespace="bob")
        assert other.bins["exact"] + other.bins["shifted"] == 0
        assert serve_stored(model, store, empty(), PROMPT, namespace="alice").bins["exact"] > 0
    read.clear()
    with Store(kv, model, config, write=False) as store:
        assert serve_stored(model, store, empty(), PROMPT, namespace="bob").bins["exact"] > 0
        assert read
        assert not [key for key in read if key.split("/")[0] in theirs]
        assert not store.metrics.skipped


def skipped(model, config, kv, **key) -> dict[str, int]:
    """Why records were passed over for the prompt; nothing may have been loaded."""
    cache = new_cache(config, model.row_format)
    with Store(kv, model, config, write=False) as store:
        key = request_key(cache, model, key.get("namespace", "default"), key.get("adapter", ""))
        cache = store.load(cache, Sources(key), PROMPT, get_policy("irminsul"))
    assert (cache.tree.namespace == FREE).all()
    assert store.metrics.stored_hits == 0
    return dict(store.metrics.skipped)


def test_rows_of_old_weights_or_another_adapter_are_skipped_and_say_so(model, config, kept):
    records = len(keys_of(kept, "index"))
    assert skipped(families.random_model(TINY_MLA, seed=1), config, kept) == {"model": records}
    assert skipped(model, config, kept, adapter="legal") == {"adapter": records}


def test_layouts_that_look_alike_never_swap(model, config, kept):
    """Rows of equal size and another meaning, under weights that say nothing of it."""
    records = len(keys_of(kept, "index"))
    assert skipped(model, dataclasses.replace(config, storage="unrotated"), kept) == {"storage": records}
    half_split = families.random_model(TINY_MLA | {"rope_interleave": False}, seed=0)
    half_split = dataclasses.replace(half_split, digest=model.digest)
    assert skipped(half_split, config, kept) == {"interleaved+rotary": records}
    slower = families.random_model(TINY_MLA | {"rope_theta": 20000.0}, seed=0)
    assert skipped(dataclasses.replace(slower, digest=model.digest), config, kept) == {"rotary": records}


def test_one_process_writes_and_others_read(model, config, empty, tmp_path):
    url = f"file://{tmp_path}/tier"
    with Store(url, model, config) as writer:
        serve_stored(model, writer, empty(), PROMPT)
        writer.flush()
        with pytest.raises(StoreLockedError, match="write=False"):
            Store(url, model, config)
        with Store(url, model, config, write=False) as reader:
            served = serve_stored(model, reader, empty(), PROMPT)
            assert served.bins["exact"] == len(PROMPT) - 1
            later = random_tokens(5, 150)
            serve_stored(model, writer, empty(), later)
            writer.flush()
            assert serve_stored(model, reader, served.cache.copy(), later).bins["exact"] == 0
            assert reader.metrics.written == 0
            reader.refresh(request_key(served.cache, model, "default", ""))
            assert serve_stored(model, reader, empty(), later).bins["exact"] == 149
            with pytest.raises(PermissionError, match="write=False"):
                reader.delete([])
    with Store(url, model, config):  # the lock went with its holder
        pass


def test_the_catalog_gives_up_what_is_unused_for_longest(model, config, empty):
    kv = memory_store()
    with Store(kv, model, config, max_pages=70) as store:
        for seed in range(4):
            serve_stored(model, store, empty(), random_tokens(seed, 401))
        store.flush()
        assert len(keys_of(kv, "rows")) == len(keys_of(kv, "index")) <= 70
        assert store.metrics.displaced > 30
        assert serve_stored(model, store, empty(), random_tokens(3, 401)).bins["exact"] == 400
        assert serve_stored(model, store, empty(), random_tokens(0, 401)).bins["exact"] == 0


def test_a_page_that_grew_replaces_what_it_grew_from(model, config, empty):
    kv = memory_store()
    with Store(kv, model, config) as store:
        cache = empty()
        for end in range(101, 125, 3):
            cache = serve_stored(model, store, cache, PROMPT[:end]).cache
        store.flush()
        tree = cache.tree
        assert len(keys_of(kv, "rows")) <= (tree.namespace >= 0).sum()
        assert serve_stored(model, store, empty(), PROMPT[:122]).bins["exact"] == 121


def test_pages_that_wait_to_be_written_are_served_and_the_queue_is_bounded(model, config, empty, cold, monkeypatch):
    kv, gate, write = memory_store(), threading.Event(), Backend.write
    with Store(kv, model, config, host_bytes=0, batch_pages=4, queued_batches=20) as store:
        store.load(empty(), Sources(request_key(empty(), model, "default", "")), PROMPT, get_policy("irminsul"))
        monkeypatch.setattr(Backend, "write", lambda *args: (gate.wait(), write(*args))[1])
        serve_stored(model, store, empty(), PROMPT)
        assert not keys_of(kv, "index")
        served = serve_stored(model, store, empty(), PROMPT)
        assert served.bins["exact"] == len(PROMPT) - 1
        assert_same_bits(served, cold)
        gate.set()
    assert len(keys_of(kv, "index")) == len(keys_of(kv, "rows")) > 30

    gate.clear()
    with Store(memory_store(), None, config, batch_pages=4, queued_batches=2) as store:
        gate.set()  # of the owner
        store.load(
            new_cache(config), Sources(request_key(new_cache(config), None, "default", "")), PROMPT, get_policy("full")
        )
        gate.clear()
        result = prefill(None, new_cache(config), PROMPT)
        cache = complete(result.cache, result.request)
        serving = threading.Thread(target=store.keep, args=(cache, result.request))
        serving.start()
        serving.join(0.3)
        assert serving.is_alive()  # 31 pages are more than two batches and the one being written
        gate.set()
        serving.join(60)
        assert not serving.is_alive()


def test_rows_without_a_record_are_swept_out_by_the_writer_alone(model, config, empty, kept):
    kv = memory_store()
    for key in keys_of(kept):
        kv.write(key, kept.read(key).result().value).result()
    change(kv, keys_of(kv, "index")[0], lambda _: None)
    for write, left in ((False, 0), (True, -1)):
        with Store(kv, model, config, write=write) as store:
            before = len(keys_of(kv, "rows"))
            store.refresh(request_key(empty(), model, "default", ""))
            assert len(keys_of(kv, "rows")) - before == left


def test_host_memory_keeps_the_most_recently_used_within_its_bytes():
    tier = HostTier(100)
    rows = {name: {"latent_pages": np.full(10, index, np.float32)} for index, name in enumerate("abc")}
    tier.put("a", rows["a"])
    tier.put("b", rows["b"])
    tier.get("a")
    tier.put("c", rows["c"])
    assert [tier.get(name) is not None for name in "abc"] == [True, False, True]
    tier.put("a", {"latent_pages": np.zeros(26, np.float32)})  # more than fits: not kept, and the old rows are stale
    assert [tier.get(name) is not None for name in "abc"] == [False, False, True]
    assert tier.nbytes == 40


def test_nothing_is_compiled_whatever_is_moved(model, config, empty, kept):
    with Store(kept, model, config, write=False) as store:
        serve_stored(model, store, empty(), PROMPT)
        fresh = [empty() for _ in range(2)]
        with count_compilations() as count:
            serve_stored(model, store, fresh[0], PROMPT[:90])
            serve_stored(model, store, fresh[1], np.concatenate([PROMPT[200:], PROMPT[:50]]))
        assert count.programs == 0


def test_pages_move_in_place_and_in_batches(model):
    """Round trip through the host; temporary memory that does not grow with the pool."""
    memory = {}
    for pages in (64, 256):
        pool = jax.eval_shape(lambda pages=pages: new_pool(model.row_format, pages, 13, jnp.bfloat16))
        ids = jax.ShapeDtypeStruct((5,), jnp.int32)
        rows = jax.eval_shape(gather_pages, pool, ids)
        analysis = scatter_pages.lower(pool, ids, rows).compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= sum(leaf.size * 2 for leaf in jax.tree.leaves(pool))
        memory[pages] = analysis.temp_size_in_bytes
    assert memory[64] == memory[256]

    pool = new_pool(model.row_format, 17, 13, jnp.bfloat16)
    pool = jax.tree.map(lambda array: jax.random.normal(jax.random.key(0), array.shape, array.dtype), pool)
    source, target, fills = [3, 5, 16, 1, 2, 7, 11], [16, 3, 0, 9, 4, 13, 8], [13, 1, 7, 13, 2, 13, 5]
    before = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, pool))
    rows = []
    for at in range(0, 7, 5):
        gathered = start_gather(pool, source[at : at + 5], 5)
        rows += [page_rows(gathered, index, fill) for index, fill in enumerate(fills[at : at + 5])]
    after = jax.tree.map(np.asarray, write_pages(pool, target, rows, 5))
    assert pool.is_deleted()
    untouched = np.setdiff1d(np.arange(17), target)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[:, untouched], old[:, untouched])
        for page, place, fill in zip(source, target, fills, strict=True):
            np.testing.assert_array_equal(new[:, place, :fill], old[:, page, :fill])
            assert not new[:, place, fill:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_rows_of_every_kind_come_back_bit_for_bit(model, config, dtype):
    """Whatever a pool holds of a row, scales of quantised latents and dependence among it."""
    config = dataclasses.replace(config, dtype=dtype)
    rng, tokens, policy, kv = np.random.default_rng(0), random_tokens(6, 90), get_policy("irminsul"), memory_store()
    with Store(kv, None, config) as store:
        result = prefill(None, new_cache(config, model.row_format), tokens)
        noise = jax.tree.map(
            lambda array: jnp.asarray(rng.integers(0, 120, array.shape)).astype(array.dtype), result.cache.pool
        )
        cache = complete(result.cache.replace(pool=noise), result.request)
        store.keep(cache, result.request)
    with Store(kv, None, config, write=False) as store:
        loaded = new_cache(config, model.row_format)
        loaded = store.load(loaded, Sources(request_key(loaded, None, "default", "")), tokens, policy)
    arrays = {name for name, array in vars(loaded.pool).items() if isinstance(array, jax.Array)}
    assert arrays >= {"latent_pages", "rope_pages", "dependence"}
    assert ("latent_scale" in arrays) == (dtype in ("float8_e4m3fn", "int8"))
    for tree_page in np.flatnonzero(loaded.tree.namespace != FREE).tolist():
        fill, begin = loaded.tree.fill[tree_page], loaded.tree.base_position[tree_page]
        page = int(np.flatnonzero((cache.tree.namespace != FREE) & (cache.tree.base_position == begin))[0])
        for name in arrays:
            kept, found = (np.asarray(getattr(one.pool, name)) for one in (cache, loaded))
            assert kept[:, page, :fill].tobytes() == found[:, tree_page, :fill].tobytes(), name
    assert (loaded.tree.namespace != FREE).sum() >= 7  # all but perhaps that of the last token


def test_only_what_would_be_served_is_loaded(model, config, empty, kept):
    """A policy that serves exact prefixes reads no page it would not serve, and one that reuses nothing reads none."""
    moved = np.concatenate([random_tokens(1, 17), PROMPT[60:330]])
    with Store(kept, model, config, write=False) as store:
        for policy in ("full", "irminsul"):
            key = request_key(empty(), model, "default", "", get_policy(policy).bitwise)
            loaded = store.load(empty(), Sources(key), moved, get_policy(policy))
            assert (loaded.tree.namespace >= 0).any() == (policy == "irminsul")


def test_pinned_pages_stay_and_what_the_pool_serves_stays_in_the_catalog(model, config, empty):
    """Loading evicts no pinned page; pages that are hot in the pool are no cold ones of the store."""
    kv = memory_store()
    with Store(kv, None, config, max_pages=75) as store:
        small = dataclasses.replace(config, num_pages=43)
        caches = [new_cache(config), new_cache(small)]
        for seed, cache in ((0, 0), (1, 1), (0, 0), (2, 1)):
            tokens = random_tokens(seed, 401)
            key = request_key(caches[cache], None, "default", "")
            caches[cache] = store.load(caches[cache], Sources(key), tokens, get_policy("irminsul"))
            result = prefill(None, caches[cache], tokens)
            caches[cache] = complete(result.cache, result.request)
            store.keep(caches[cache], result.request)
        held = caches[1].tree.namespace >= 0
        caches[1].tree.pinned[held] = True
        fresh = new_cache(config)
        for seed in (0, 2):
            loaded = store.load(fresh, Sources(key), random_tokens(seed, 401), get_policy("irminsul"))
            fresh = loaded
            assert (loaded.tree.namespace >= 0).sum() > 30
        before = caches[1].tree.serial.copy()
        pinned = store.load(caches[1], Sources(key), random_tokens(0, 401), get_policy("irminsul"))
        np.testing.assert_array_equal(pinned.tree.serial[held], before[held])
        assert store.metrics.misses["room"] > 20
