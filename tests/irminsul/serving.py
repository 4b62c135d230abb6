"""Helpers of the tests that serve prompts: one call a request, prompts by editing, NaN where nothing may be read."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from irminsul.cache import ContentCache, open_namespace
from irminsul.cache_key import request_key
from irminsul.content import read_content
from irminsul.plan import EXACT, SHIFTED, ReusePlan, plan_prompt
from irminsul.policies import get_policy
from irminsul.prefill import PrefillResult, complete, prefill


@dataclasses.dataclass(frozen=True)
class Served:
    """One request as the laws compare it: ``hidden [T, D]`` holds NaN where a token was not computed."""

    cache: ContentCache
    plan: ReusePlan
    logits: np.ndarray
    hidden: np.ndarray

    @property
    def bins(self) -> dict[str, int]:
        return self.plan.bins

    @property
    def computed(self) -> np.ndarray:
        """``bool [T]``."""
        return ~np.isin(self.plan.bin_of_token, (EXACT, SHIFTED))


def serve(model, cache, tokens, policy="irminsul", mode="deterministic", **options) -> Served:
    """Serves one prompt and keeps its rows; ``cache`` is consumed."""
    result = prefill(model, cache, tokens, policy, mode=mode, keep_hidden=True, **options)
    return Served(complete(result.cache, result.request), result.request.plan, *outputs(result))


def outputs(result: PrefillResult) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and hidden states by position."""
    plan = result.request.plan
    computed = np.flatnonzero(~np.isin(plan.bin_of_token, (EXACT, SHIFTED)))
    hidden = np.full((plan.length, result.hidden.shape[1]), np.nan, np.float32)
    hidden[computed] = np.asarray(result.hidden)[: len(computed)]
    return np.asarray(result.logits), hidden


def assert_same_bits(served: Served, reference: Served) -> None:
    """Logits, and the hidden state of every token that ``served`` computed, equal those of ``reference``."""
    computed = served.computed
    assert np.isfinite(served.hidden[computed]).all()
    np.testing.assert_array_equal(served.hidden[computed], reference.hidden[computed])
    np.testing.assert_array_equal(served.logits, reference.logits)


def plan_of(model, cache, tokens, policy="irminsul", namespace="default") -> ReusePlan:
    """What ``prefill`` would plan; changes nothing."""
    policy = get_policy(policy)
    key = request_key(cache, model, namespace, "", policy.bitwise)
    cache, owner = open_namespace(cache, key)
    content = read_content(np.asarray(tokens, np.int32), cache.config.chunking, key)
    window = cache.config.chunking.anchor_window
    return plan_prompt(cache.tree, cache.registry, content, owner, policy, window)


def rows_read(cache: ContentCache, plan: ReusePlan) -> np.ndarray:
    """``bool [N, G]``: the rows a plan serves from."""
    read = np.zeros(cache.tree.tokens.shape, bool)
    for span in plan.spans:
        for piece in span.pieces:
            read[piece.page, piece.row_begin : piece.row_end] = True
    return read


def rows_held(cache: ContentCache, owner: int) -> np.ndarray:
    """``bool [N, G]``: the rows that hold a token of a namespace."""
    tree = cache.tree
    return (tree.namespace == owner)[:, None] & (np.arange(tree.page_size) < tree.fill[:, None])


def poison_all_but(cache: ContentCache, kept: np.ndarray) -> ContentCache:
    """Writes NaN into every row of the pool that ``kept [N, G]`` does not mark."""

    def poison(pages):
        pages = np.array(pages)
        pages[:, ~kept] = np.nan
        return jnp.asarray(pages)

    pages = {name: poison(getattr(cache.pool, name)) for name in ("latent_pages", "rope_pages")}
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, **pages))


def random_tokens(seed: int, length: int, vocab: int = 211) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length, dtype=np.int32)


@st.composite
def edits(draw, tokens: np.ndarray, limit: int) -> np.ndarray:
    """``tokens`` after up to four insertions, deletions, moves, repetitions and replacements, 1 to ``limit`` long."""
    tokens = np.asarray(tokens)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("insert", "delete", "move", "repeat", "replace")))
        begin = draw(st.integers(0, len(tokens)))
        length = draw(st.integers(1, 150))
        part = tokens[begin : begin + length]
        new = random_tokens(draw(st.integers(0, 5)), length)
        if kind == "insert":
            tokens = np.concatenate([tokens[:begin], new, tokens[begin:]])
        elif kind == "replace":
            tokens = np.concatenate([tokens[:begin], new[: len(part)], tokens[begin + length :]])
        elif kind == "repeat":
            tokens = np.concatenate([tokens[:begin], part, part, tokens[begin + length :]])
        else:
            rest = np.concatenate([tokens[:begin], tokens[begin + length :]])
            place = draw(st.integers(0, len(rest)))
            moved = part if kind == "move" else part[:0]
            tokens = np.concatenate([rest[:place], moved, rest[place:]])
    tokens = tokens[:limit]
    return tokens.astype(np.int32) if len(tokens) else random_tokens(0, 1)


@st.composite
def prompts(draw, limit: int) -> np.ndarray:
    """A prompt of 1 to ``limit`` tokens: random, or periodic."""
    length = draw(st.integers(1, limit))
    if draw(st.booleans()):
        return random_tokens(draw(st.integers(0, 3)), length)
    period = random_tokens(draw(st.integers(0, 3)), draw(st.integers(1, 40)))
    return np.resize(period, length).astype(np.int32)
