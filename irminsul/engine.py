"""Serving requests one after the other from one cache, with a reason for every token that was computed."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int8

from irminsul.blocks import Mode, blocks_for
from irminsul.cache import CacheConfig, ConsumedError, ContentCache, alive_or_empty, new_cache
from irminsul.commit import PoolTooSmallError
from irminsul.counters import Counters, no_counts, of_request, one_refused
from irminsul.decode import advance, start_decoding
from irminsul.forget import Forgotten
from irminsul.policies import Policy, get_policy
from irminsul.prefill import PrefillResult, prefill
from irminsul.prompt_checks import as_token_ids, check_token_ids
from irminsul.publish import isolate_each, publish
from irminsul.rope import check_rotation
from irminsul.sampling import all_finite, check_sampling
from irminsul.store import Store
from irminsul.tiers import end_request, forget_everywhere, load_ahead, open_store


@dataclasses.dataclass(frozen=True)
class Response:
    """What a request got.

    Fields:
      bins: tokens of the prompt by bin (``plan.BINS``); sums to its length.
      bin_of_token: index into ``plan.BINS`` of each prompt token.
      logits: after the prompt's last token; None without a model.
      tokens: generated or forced tokens.
      step_logits: ``[n, V]``, the logits each of them was predicted by.
      timings: milliseconds of ``load_ms`` (pages from the store), ``plan_ms``, ``prefill_ms``, ``ttft_ms`` (request to
        first token known), ``decode_ms``, ``register_ms``.
      table_entries: entries of the page table after prefill.
      request: the clock of the step that served it, by which ``Engine.forget`` knows it.
    """

    bins: dict[str, int]
    bin_of_token: Int8[np.ndarray, " T"]
    logits: Float[np.ndarray, " V"] | None
    tokens: list[int]
    step_logits: Float[np.ndarray, "n V"] | None
    timings: dict[str, float]
    table_entries: int
    request: int


@dataclasses.dataclass
class Engine:
    """A model, a policy and the cache between requests: the only mutable object of the project.

    Everything it does is a pure function of ``prefill``, ``decode`` and ``cache``; those can be called without it.
    """

    model: Any
    cache: ContentCache
    policy: Policy
    mode: Mode
    store: Store | None = None
    counters: Counters = dataclasses.field(default_factory=no_counts)

    @classmethod
    def create(
        cls,
        model: Any,
        config: CacheConfig,
        policy: str | Policy = "irminsul",
        mode: Mode = "fast",
        store: Store | str | None = None,
    ) -> "Engine":
        """An engine with an empty cache. ``model`` None plans and keeps books, without computing anything.

        Args:
          store: tiers below the pool (``store.py``), or the URL of one to write: pages are read from it ahead of a
            prompt and written to it behind, so that they outlive eviction and this process.

        Raises:
          ValueError: for an unknown policy or mode, or a store of another cache format.
          RotationError: if the model's keys cannot be moved by its rotary table.
          StoreLockedError: if another process writes the store.
        """
        policy = get_policy(policy)
        if model is not None:
            blocks_for(model, mode)
            check_rotation(model, config)
        below = open_store(store, model, config)
        cache = new_cache(config) if model is None else new_cache(config, model.row_format)
        return cls(model, cache, policy, mode, below)

    def serve(
        self,
        tokens: np.ndarray,
        *,
        namespace: str = "default",
        adapter: str = "",
        continuation: np.ndarray | None = None,
        max_new_tokens: int = 0,
        stop_tokens: tuple[int, ...] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        shared: tuple[str, ...] = (),
    ) -> Response:
        """Serves one prompt and keeps its rows as the policy says.

        Args:
          tokens: the prompt.
          namespace, adapter: who may share its rows.
          continuation: the response to follow (teacher forcing) instead of generating; its rows are kept as decoded.
          max_new_tokens: how many tokens to generate, fewer if one of ``stop_tokens`` comes up.
          temperature, top_p, seed: sampling; temperature 0 is greedy.
          on_token: called with each token as it is known. It must not make this engine serve or forget.
          shared: published namespaces to read besides (``publish``).

        Raises:
          As ``prefill``. The engine can be used on afterwards, whatever interrupts it: where that left no cache (Ctrl-C
          in the middle of a step), with an empty one.
        """
        check_sampling(temperature, top_p, seed, stop_tokens)
        forced = None if continuation is None else as_token_ids("continuation", continuation)
        if forced is not None:
            check_token_ids(forced, self.model)
        who: dict[str, Any] = {"namespace": namespace, "adapter": adapter, "mode": self.mode}
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        with self._usable_afterwards():
            return self._serve(tokens, who, shared, forced, max_new_tokens, stop_tokens, sampling, on_token)

    def _serve(
        self,
        tokens: np.ndarray,
        who: dict[str, Any],
        shared: tuple[str, ...],
        forced: np.ndarray | None,
        max_new_tokens: int,
        stop_tokens: tuple[int, ...],
        sampling: dict[str, Any],
        on_token: Callable[[int], None] | None,
    ) -> Response:
        """``serve`` of what is checked as far as no cache is needed; ``who`` asks, in which mode."""
        started = time.perf_counter()
        count = max_new_tokens if forced is None else len(forced)
        self.cache = load_ahead(
            self.store, self.model, self.cache, tokens, self.policy, **who, shared=shared, new_tokens=count
        )
        loaded = time.perf_counter()
        if self.policy.provenance == "isolated" and self.policy.shifted == "serve":
            for cache in isolate_each(self.model, self.cache, tokens, self.policy, **who, store=self.store):
                self.cache = cache
        try:
            result = prefill(self.model, self.cache, tokens, self.policy, **who, shared=shared, new_tokens=count)
        except PoolTooSmallError:
            self.counters += one_refused()
            raise
        self.counters += of_request(result.request)
        self.cache = result.cache
        first = time.perf_counter()
        emitted: list[int] = []
        logits: list[np.ndarray] = []
        written = forced
        if result.logits is not None:
            try:
                emitted, written, logits = self._decode(result, count, forced, stop_tokens, sampling, on_token)
            except BaseException:  # of on_token, say: the prompt's rows are kept and no page stays in flight
                with contextlib.suppress(ConsumedError):
                    self.cache = end_request(self.store, self.cache, result.request)
                raise
        decoded = time.perf_counter()
        self.cache = end_request(self.store, self.cache, result.request, written)
        timings = {
            **result.timings,
            "load_ms": 1e3 * (loaded - started),
            "ttft_ms": 1e3 * (first - started),
            "decode_ms": 1e3 * (decoded - first),
            "register_ms": 1e3 * (time.perf_counter() - decoded),
        }
        return Response(
            bins=result.request.plan.bins,
            bin_of_token=result.request.plan.bin_of_token,
            logits=None if result.logits is None else np.asarray(result.logits),
            tokens=emitted,
            step_logits=np.stack(logits) if logits else None,
            timings=timings,
            table_entries=len(result.request.entries),
            request=result.request.clock,
        )

    def publish(
        self, context: np.ndarray, texts: Sequence[np.ndarray] = (), *, namespace: str, adapter: str = ""
    ) -> None:
        """Keeps rows of ``texts``, computed behind ``context`` alone, for requests with ``namespace`` among ``shared``.

        Raises:
          As ``publish.publish``. The engine can be used on afterwards.
        """
        with self._usable_afterwards():
            for text in texts or [np.zeros(0, np.int32)]:
                self.cache = publish(
                    self.model, self.cache, context, [text],
                    namespace=namespace, adapter=adapter, mode=self.mode, store=self.store,
                )  # fmt: skip

    def forget(self, what: np.ndarray | int, *, namespace: str = "default") -> Forgotten:
        """Removes a text, or what one request (``Response.request``) computed, and everything computed from it.

        A store forgets, too, for good when this returns; what is reported is of the cache.

        Raises:
          As ``tiers.forget_everywhere``. The engine can be used on afterwards.
        """
        with self._usable_afterwards():
            self.cache, forgotten = forget_everywhere(self.store, self.cache, what, namespace=namespace)
            return forgotten

    @contextlib.contextmanager
    def _usable_afterwards(self) -> Iterator[None]:
        """Puts an empty cache in the place of one that a step had taken over when it was interrupted."""
        self.cache.require_alive()
        try:
            yield
        except BaseException:
            self.cache = alive_or_empty(self.cache, self.model)
            raise

    def _decode(
        self,
        result: PrefillResult,
        count: int,
        forced: np.ndarray | None,
        stop_tokens: tuple[int, ...],
        sampling: dict[str, Any],
        on_token: Callable[[int], None] | None,
    ) -> tuple[list[int], np.ndarray, list[np.ndarray]]:
        """Emitted tokens, those of them whose rows are to be kept, and the logits that predicted each."""
        if not count:
            return [], np.zeros(0, np.int32), []
        assert result.logits is not None
        decoding = start_decoding(self.cache, result.request, result.logits, **sampling)
        emitted: list[int] = []
        logits: list[np.ndarray] = []
        for index in range(count):
            token = decoding.proposal if forced is None else int(forced[index])
            emitted.append(token)
            logits.append(np.asarray(decoding.logits))
            if on_token is not None:
                on_token(token)
            last = index + 1 == count or token in stop_tokens
            if not (last and forced is None):
                decoding = advance(self.model, decoding, token)
                self.cache = decoding.cache
            if last:
                break
        sound = all_finite(decoding.logits) and all(map(all_finite, logits))
        return emitted, np.asarray(decoding.tokens if sound else [], np.int32), logits
