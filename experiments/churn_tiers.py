"""The tiers below the cache of a churn worker: a store for each model, restarts, and objects that get damaged."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore

from irminsul.cache import CacheConfig, ContentCache
from irminsul.policies import Policy
from irminsul.prefill import Request
from irminsul.sources import Sources
from irminsul.store import Store
from irminsul.store_reading import ReadAhead

MAX_PAGES = 128
# Reasons for a page not served or a record passed over that a damaged object gives.
DAMAGED = ("missing", "truncated", "corrupt", "foreign", "version", "format", "unreadable")


class Tiers:
    """Stores by model over one key-value store in memory."""

    def __init__(self, config: CacheConfig):
        self.config = config
        self._kv = tensorstore.KvStore.open("memory://", context=tensorstore.Context()).result()
        self._stores: dict[str, Store] = {}

    def of(self, model: Any) -> Store:
        """The store that holds the rows of a model."""
        if model.digest not in self._stores:
            # Little host memory, so that most pages are read from their objects.
            self._stores[model.digest] = Store(
                self._kv / f"{model.digest}/", model, self.config, max_pages=MAX_PAGES, host_bytes=2**14
            )
        return self._stores[model.digest]

    def load(
        self, model: Any, cache: ContentCache, sources: Sources, tokens: np.ndarray, policy: Policy, new_tokens: int
    ) -> tuple[ContentCache, int]:
        """Brings back what a prompt would be served from; also how many damaged objects were met on the way."""
        ahead, met = self.look_ahead(model, cache, sources, tokens, policy, new_tokens)
        cache, damaged = self.bring(model, cache, ahead)
        return cache, met + damaged

    def look_ahead(
        self,
        model: Any,
        cache: ContentCache,
        sources: Sources,
        tokens: np.ndarray,
        policy: Policy,
        new_tokens: int,
        *,
        wait: bool = True,
    ) -> tuple[ReadAhead, int]:
        """``Store.look_ahead``, and the damaged objects met; what it reads is here, so that a run can be repeated."""
        store = self.of(model)
        before = _met(store)
        ahead = store.look_ahead(cache, sources, tokens, policy, new_tokens, wait=wait)
        ahead.wait()
        return ahead, _met(store) - before

    def bring(self, model: Any, cache: ContentCache, ahead: ReadAhead) -> tuple[ContentCache, int]:
        """``Store.bring``, and the damaged objects met."""
        store = self.of(model)
        before = _met(store)
        return store.bring(cache, ahead), _met(store) - before

    def keep(self, model: Any, cache: ContentCache, request: Request, generated: np.ndarray | None) -> None:
        """Writes what a request has left."""
        self.of(model).keep(cache, request, generated)

    def forget(self, models: Sequence[Any], what: np.ndarray | int, namespace: str) -> int:
        """Forgets a text of a tenant, or one request, in every store; returns how many requests that reached."""
        return sum(self.of(model).forget(what, namespace=namespace).requests for model in models)

    def restart(self) -> None:
        """Closes the stores; they read what is stored when they are needed again."""
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def damage(self, rng: np.random.Generator) -> None:
        """Damages one stored object: a bit, its length, its place, or all of it."""
        self.restart()
        keys = sorted(key for key in self._kv.list().result() if b"/rows/" in key or b"/index/" in key)
        if not keys:
            return
        victim, other = (keys[index] for index in rng.integers(len(keys), size=2))
        data = self._kv.read(victim).result().value
        place, bit = rng.integers(len(data)), 1 << int(rng.integers(8))
        damaged = (
            data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :],
            data[:place],
            self._kv.read(other).result().value,
            None,
        )[rng.integers(4)]
        self._kv.write(victim, damaged).result()

    def objects(self) -> dict[bytes, bytes]:
        """Everything stored."""
        self.restart()
        return {key: self._kv.read(key).result().value for key in self._kv.list().result()}

    def put_back(self, objects: dict[bytes, bytes]) -> None:
        """What ``objects`` gave."""
        for key, value in objects.items():
            self._kv.write(key, value).result()


def _met(store: Store) -> int:
    counts: Counter[str] = store.metrics.misses + store.metrics.skipped
    return sum(counts[reason] for reason in DAMAGED)
