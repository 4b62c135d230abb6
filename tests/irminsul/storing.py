"""Helpers of the tests of the tiers: requests through a store, and what lies in it."""

import numpy as np
import tensorstore

from irminsul.cache import ContentCache
from irminsul.cache_key import request_key
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill
from irminsul.sources import Sources
from irminsul.store import Store
from tests.irminsul.serving import Served, outputs


def memory_store() -> tensorstore.KvStore:
    """An empty key-value store of its own."""
    return tensorstore.KvStore.open("memory://", context=tensorstore.Context()).result()


def serve_stored(model, store: Store, cache: ContentCache, tokens, policy="irminsul", **options) -> Served:
    """Serves one prompt with a store below the pool; ``cache`` is consumed."""
    policy = get_policy(policy)
    namespace, adapter = options.get("namespace", "default"), options.get("adapter", "")
    key = request_key(cache, model, namespace, adapter, policy.bitwise)
    cache = store.load(cache, Sources(key), tokens, policy)
    result = prefill(model, cache, tokens, policy, mode="deterministic", keep_hidden=True, **options)
    cache = complete(result.cache, result.request)
    store.keep(cache, result.request)
    return Served(cache, result.request.plan, *outputs(result))


def keys_of(kv: tensorstore.KvStore, part: str = "") -> list[str]:
    """Keys in a store that hold ``/part/``, sorted."""
    keys = [key.decode() for key in kv.list().result()]
    return sorted(key for key in keys if not part or f"/{part}/" in key)


def change(kv: tensorstore.KvStore, key: str, how) -> None:
    """Replaces an object by ``how(its bytes)``; None deletes it."""
    kv.write(key, how(kv.read(key).result().value)).result()


def flip(data: bytes) -> bytes:
    """One bit in the last quarter of an object is another."""
    damaged = bytearray(data)
    damaged[3 * len(data) // 4] ^= 4
    return bytes(damaged)


def assert_links_are_whole(cache: ContentCache) -> None:
    """Every child is listed by its parent, and the other way round."""
    tree = cache.tree
    for page in np.flatnonzero(tree.namespace >= 0).tolist():
        child, before = int(tree.first_child[page]), -1
        while child != -1:
            assert (tree.parent[child], tree.previous_sibling[child]) == (page, before)
            child, before = int(tree.next_sibling[child]), child
