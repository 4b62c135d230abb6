"""Stored objects that are damaged, foreign, half-written or gone: skipped with a reason and computed, same tokens."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from irminsul.cache import CacheConfig, new_cache
from irminsul.cache_key import request_key
from irminsul.page_tree import FREE
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill
from irminsul.sources import Sources
from irminsul.store import Store
from irminsul.store_backend import Backend, StoreWriteError
from irminsul.store_owner import owner_of
from irminsul.store_record import StoredObjectError
from irminsul.store_transfer import page_rows, start_gather, write_pages
from models.families import RowFormat
from tests.irminsul.conftest import SMALL_CHUNKS
from tests.irminsul.serving import assert_same_bits, random_tokens, serve
from tests.irminsul.storing import change, flip, keys_of, memory_store, serve_stored

PROMPT = random_tokens(0, 401)


@pytest.fixture(scope="module")
def empty(model, config):
    return lambda: new_cache(config, model.row_format)


@pytest.fixture(scope="module")
def cold(model, empty):
    return serve(model, empty(), PROMPT)


@pytest.fixture(scope="module")
def kept(model, config, empty):
    """A store that holds the prompt for the policies ``prefix`` and ``irminsul``."""
    kv = memory_store()
    with Store(kv, model, config) as store:
        for policy in ("prefix", "irminsul"):
            serve_stored(model, store, empty(), PROMPT, policy)
    return {key: kv.read(key).result().value for key in keys_of(kv)}


def copy_of(objects):
    kv = memory_store()
    for key, value in objects.items():
        kv.write(key, value).result()
    return kv


OTHER_VERSION = struct.pack("<4sI", b"IRMS", 99)
DAMAGES = {
    "gone": (lambda data: None, "missing"),
    "empty": (lambda data: b"", "truncated"),
    "cut in its header": (lambda data: data[:13], "truncated"),
    "cut in the middle": (lambda data: data[: len(data) // 2], "truncated"),
    "longer than it says": (lambda data: data + b"\0", "truncated"),
    "a bit flipped": (flip, "corrupt"),
    "something else": (lambda data: b"\x89PNG" + data[4:], "foreign"),
    "of a later version": (lambda data: OTHER_VERSION + data[8:], "version"),
    "sealed nonsense": (lambda data: b"IRMS" + struct.pack("<IQQ", 1, 0, 0xEF46DB3751D8E999), "corrupt"),
}


@pytest.mark.parametrize("part", ["rows", "index"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_computed_and_the_answer_is_the_same(model, config, empty, cold, kept, part, damage):
    how, reason = DAMAGES[damage]
    kv = copy_of(kept)
    victims = keys_of(kv, part)[::5]
    for key in victims:
        change(kv, key, how)
    with Store(kv, model, config) as store:
        served = serve_stored(model, store, empty(), PROMPT, "prefix")
        assert_same_bits(served, cold)
        assert served.bins["exact"] < len(PROMPT) - 1
        if not (part == "index" and damage == "gone"):
            assert (store.metrics.misses if part == "rows" else store.metrics.skipped)[reason] > 0
        shifted = serve_stored(model, store, empty(), PROMPT, "irminsul")
        assert shifted.bins["exact"] < len(PROMPT) - 1
        assert np.isfinite(shifted.logits).all()
    with Store(kv, model, config) as store:  # what was computed has taken the place of what was damaged
        served = serve_stored(model, store, empty(), PROMPT, "prefix")
        assert served.bins["exact"] == len(PROMPT) - 1
        assert_same_bits(served, cold)


@pytest.mark.parametrize("damage", ["cut in the middle", "something else", "of a later version"])
def test_a_damaged_record_is_swept_out_with_its_rows(model, config, empty, kept, damage):
    """Nobody may ask for that page again. What another version has written stays."""
    kv, (how, reason) = copy_of(kept), DAMAGES[damage]
    key = request_key(empty(), model, "default", "", False)
    with Store(kv, model, config) as store:
        mine = [name for name in keys_of(kv, "index") if owner_of(key, store.format).prefix in name]
        change(kv, mine[1], how)
        store.refresh(key)
    assert mine[0] in keys_of(kv)
    for name in (mine[1], mine[1].replace("/index/", "/rows/")):
        assert (name in keys_of(kv)) == (reason == "version")


def test_objects_that_changed_places_are_not_believed(model, config, empty, cold, kept):
    """Sealed and whole, but under the name of another page."""
    for part, counted in (("rows", "misses"), ("index", "skipped")):
        kv = copy_of(kept)
        keys = keys_of(kv, part)
        for key, value in zip(keys, [kept[key] for key in keys[1:] + keys[:1]], strict=True):
            kv.write(key, value).result()
        with Store(kv, model, config, write=False) as store:
            served = serve_stored(model, store, empty(), PROMPT, "prefix")
            assert_same_bits(served, cold)
            assert served.bins["exact"] == 0
            assert getattr(store.metrics, counted)["foreign"] > 0


def test_a_store_that_cannot_be_read_or_written_costs_hits_and_nothing_else(
    model, config, empty, cold, kept, monkeypatch
):
    def refuse(*_):
        raise StoreWriteError("the network is gone")

    kv = memory_store()
    with Store(kv, model, config) as store:
        store.load(empty(), Sources(request_key(empty(), model, "default", "")), PROMPT, get_policy("irminsul"))
        with monkeypatch.context() as patched:
            patched.setattr(Backend, "write", refuse)
            served = serve_stored(model, store, empty(), PROMPT)
            assert_same_bits(served, cold)
            with pytest.raises(StoreWriteError, match="the network is gone"):
                store.flush()
        assert store.metrics.write_failures > 20
        assert not keys_of(kv, "index")
        serve_stored(model, store, empty(), random_tokens(1, 90))
        store.flush()
        assert keys_of(kv, "index")


def test_a_store_that_cannot_be_listed_is_asked_again(model, config, empty, cold, kept, monkeypatch):
    def refuse(*_):
        raise StoredObjectError("unreadable", "no answer")

    with Store(copy_of(kept), model, config) as store:
        with monkeypatch.context() as patched:
            patched.setattr(Backend, "finish_list", refuse)
            served = serve_stored(model, store, empty(), PROMPT)
            assert served.bins["exact"] == 0
            assert_same_bits(served, cold)
        assert store.metrics.skipped["unreadable"] == 2  # before the request and after it
        assert serve_stored(model, store, empty(), PROMPT).bins["exact"] == len(PROMPT) - 1


def test_a_closed_store_says_so(model, config, empty):
    store = Store(memory_store(), model, config)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed; open it again"):
        serve_stored(model, store, empty(), PROMPT)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("rows", "store='rows/' is no URL of a store; write file:///"),
        ("http://localhost/rows", "can only be read"),
        ("file:///proc/rows/", "store folder /proc/rows/ cannot be written .* name one that can"),
    ],
)
def test_a_url_that_cannot_be_written_is_refused(model, config, url, match):
    with pytest.raises(ValueError, match=match) as caught:
        Store(url, model, config)
    assert "\n" not in str(caught.value)
    if "http" in url:
        Store(url, model, config, write=False).close()


def test_a_crash_at_any_write_leaves_a_readable_store(model, config, empty, monkeypatch):
    """The n-th object and all behind it are never written, for every n: what is there is served, right and in part."""
    tokens = random_tokens(2, 45)
    reference = serve(model, empty(), tokens)
    start_write = Backend.start_write

    def crashing(limit):
        written = 0

        def one_by_one(self, objects):
            nonlocal written
            for key, value in objects.items():
                if written == limit:
                    raise StoreWriteError("crashed")
                self.finish_write(start_write(self, {key: value}))
                written += 1
            return []

        return one_by_one

    exact = []
    for limit in range(1, 11):  # the owner, the computation, and record and rows of four pages
        kv = memory_store()
        with monkeypatch.context() as patched, Store(kv, model, config, batch_pages=2) as store:
            patched.setattr(Backend, "start_write", crashing(limit))
            serve_stored(model, store, empty(), tokens, "prefix")
            store._writer.wait()
        assert len(keys_of(kv)) == limit
        with Store(kv, model, config) as store:
            served = serve_stored(model, store, empty(), tokens, "prefix")
            assert_same_bits(served, reference)
            assert not store.metrics.misses
            exact.append(served.bins["exact"])
    assert exact == sorted(exact)
    assert exact[0] == 0
    assert exact[-1] == len(tokens) - 1


# A process that keeps pages until it is killed, and what it wrote; no model is needed for that.
ROWS = RowFormat("latent", 2, 5, 4, True)
CONFIG = CacheConfig(num_pages=61, page_size=13, max_prompt_tokens=409, dependence=False, chunking=SMALL_CHUNKS)
WRITER = """
import sys
from irminsul.store import Store
from tests.irminsul.test_store_faults import CONFIG, keep_documents

with Store(sys.argv[1], None, CONFIG, batch_pages=3) as store:
    keep_documents(store, int(sys.argv[2]))
"""


def expected_rows(tokens):
    """Rows that say which tokens they are of."""
    latent = np.arange(10, dtype=np.float32).reshape(2, 1, 5) + 100 * tokens[:, None].astype(np.float32)
    return {"latent_pages": latent, "rope_pages": -latent[..., :4]}


def keep_document(store, cache, tokens, sign=1):
    """Serves tokens without a model and keeps rows that say which they are of; returns the cache."""
    result = prefill(None, cache, tokens)
    cache = complete(result.cache, result.request)
    pages = [page for page in result.request.pages.tolist() if cache.tree.namespace[page] != FREE]
    rows = [expected_rows(sign * cache.tree.tokens[page, : cache.tree.fill[page]]) for page in pages]
    cache = cache.replace(pool=write_pages(cache.pool, pages, rows, 3))
    store.keep(cache, result.request)
    return cache


def keep_documents(store, seed):
    cache = new_cache(CONFIG, ROWS)
    for document in range(seed, seed + 10_000):
        cache = keep_document(store, cache, random_tokens(document, 200))
        print(document, flush=True)


def assert_rows_are_of(cache, sign=1):
    """Every stored row of a pool is of its token."""
    for page in np.flatnonzero(cache.tree.namespace != FREE).tolist():
        fill = int(cache.tree.fill[page])
        rows = page_rows(start_gather(cache.pool, [page], 3), 0, fill)
        for name, expected in expected_rows(sign * cache.tree.tokens[page, :fill]).items():
            np.testing.assert_array_equal(rows[name], expected)


def test_what_waits_to_be_written_goes_before_what_host_memory_held(monkeypatch):
    """A page is deleted and kept anew, with other rows, before the writer has come to either."""
    gate, write, tokens = threading.Event(), Backend.write, random_tokens(0, 39)
    monkeypatch.setattr(Backend, "write", lambda *args: (gate.wait(5), write(*args))[1])
    with Store(memory_store(), None, CONFIG, batch_pages=3) as store:
        gate.set()
        keep_document(store, new_cache(CONFIG, ROWS), tokens)
        store.flush()
        names = list(store._catalog.entries)
        gate.clear()
        keep_document(store, new_cache(CONFIG, ROWS), random_tokens(1, 40))  # the writer is busy with it
        assert store.delete(names) == len(names)
        keep_document(store, new_cache(CONFIG, ROWS), tokens, sign=-1)
        assert set(names) <= set(store._catalog.entries)
        cache = new_cache(CONFIG, ROWS)
        cache = store.load(cache, Sources(request_key(cache, None, "default", "")), tokens, get_policy("irminsul"))
        assert (cache.tree.namespace != FREE).sum() == len(names)
        assert_rows_are_of(cache, sign=-1)
        gate.set()


def test_a_process_killed_while_it_writes_leaves_a_readable_store(tmp_path):
    url = f"file://{tmp_path}/tier"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    rng = np.random.default_rng(0)
    held = 0
    for attempt in range(2):
        command = [sys.executable, "-c", WRITER, url, str(100 * attempt)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(3):
                assert process.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        with Store(url, None, CONFIG) as store:
            exact = 0
            for document in range(100 * attempt, 100 * attempt + 5):
                tokens, cache = random_tokens(document, 200), new_cache(CONFIG, ROWS)
                cache = store.load(
                    cache, Sources(request_key(cache, None, "default", "")), tokens, get_policy("irminsul")
                )
                assert_rows_are_of(cache)
                exact += prefill(None, cache, tokens).request.plan.bins["exact"]
            assert exact > 0
            assert not store.metrics.misses
            assert not store.metrics.skipped
            assert len(store._catalog.entries) > held
            held = len(store._catalog.entries)


def test_what_a_killed_writer_left_behind_is_written_over(model, config, empty, tmp_path):
    """A temporary file of a rename that never came is no object, and does not stand in the way of one."""
    url = f"file://{tmp_path}/tier"
    with Store(url, model, config) as store:
        serve_stored(model, store, empty(), PROMPT[:90])
    rows = sorted(tmp_path.glob("tier/*/*/rows/*"))
    for path in rows:
        path.rename(f"{path}.__lock")
    with Store(url, model, config) as store:
        served = serve_stored(model, store, empty(), PROMPT[:90], "prefix")
        assert served.bins["exact"] == 0
        serve_stored(model, store, empty(), PROMPT[:90])
    with Store(url, model, config, write=False) as store:
        assert serve_stored(model, store, empty(), PROMPT[:90]).bins["exact"] == 89
