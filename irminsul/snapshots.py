"""Exact prefixes of models with recurrent layers: snapshots of their memories at the ends of blocks.

A recurrent memory is a function of all tokens before it, in order. It cannot be taken for some tokens and put behind
others, so shifted reuse is refused by the model's name (``models/families.REFUSED``), whatever the policy promises
elsewhere. An exact prefix is served: the memories behind its last whole block, and the rows that attention layers of a
hybrid hold for it. Prompts run in blocks of one size, so what is served has the bits of a cold run.

Blocks form a tree per key (tenant, weights, adapter): a node holds a block's tokens, the snapshot behind it and the
rows of its attention layers. A fingerprint finds a node among its siblings; its tokens are compared before it is used.
The model is a value with ``empty_state`` and ``prefill``; its states are pytrees whose leaves begin ``[batch, tokens]``
where they are rows.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int32

from irminsul.cache_key import check_names
from irminsul.fingerprint import fingerprint, key_bytes
from irminsul.policies import Policy, get_policy
from irminsul.prompt_checks import as_token_ids, check_token_ids
from irminsul.sampling import Sampling, all_finite, check_sampling, sample


@dataclasses.dataclass(frozen=True)
class SnapshotConfig:
    """Static shape of the cache.

    Fields:
      block: tokens between snapshots, which is also the block that prompts are computed in.
      max_prompt_tokens: longest prompt.
      max_new_tokens: longest answer.
      capacity_bytes: of snapshots and rows kept; the block used longest ago goes first, the deepest of a path ahead.
    """

    block: int = 512
    max_prompt_tokens: int = 65536
    max_new_tokens: int = 0
    capacity_bytes: int = 8 * 2**30

    def __post_init__(self):
        if self.block < 1 or self.max_prompt_tokens < self.block:
            raise ValueError(
                f"block={self.block} must be at least 1 and at most max_prompt_tokens={self.max_prompt_tokens}"
            )
        if self.capacity_bytes < 0 or self.max_new_tokens < 0:
            raise ValueError(
                f"capacity_bytes={self.capacity_bytes} and max_new_tokens={self.max_new_tokens} must not be negative"
            )


@dataclasses.dataclass(eq=False)
class Node:
    """One block of a prompt, behind the blocks of its parents."""

    tokens: Int32[np.ndarray, " block"]
    memories: Any
    rows: Any
    parent: "Node | None"
    last_used: int
    children: dict[int, list["Node"]] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of snapshot and rows."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.memories, self.rows)))


@dataclasses.dataclass(frozen=True)
class SnapshotResponse:
    """Logits after the prompt's last token, how many of its tokens were served from the cache and how many computed,
    and the answer."""

    logits: Float[np.ndarray, " V"]
    bins: dict[str, int]
    tokens: list[int]


class SnapshotCache:
    """A recurrent model, a policy and what is kept between its requests."""

    def __init__(self, model: Any, config: SnapshotConfig, policy: str | Policy = "prefix"):
        """An empty cache.

        Raises:
          ValueError: for a policy that serves shifted rows, by the name of the model and with the reason; or one that
            cuts exact prefixes at other places than snapshots stand.
        """
        self.model, self.config, self.policy = model, config, get_policy(policy)
        check_policy(model, self.policy)
        self.roots: dict[bytes, Node] = {}
        self.clock = 0
        self.nbytes = 0
        self.evicted = 0

    def serve(
        self,
        tokens: np.ndarray,
        *,
        namespace: str = "default",
        adapter: str = "",
        max_new_tokens: int = 0,
        stop_tokens: tuple[int, ...] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> SnapshotResponse:
        """Serves one prompt and keeps a snapshot behind each of its whole blocks, if the policy keeps anything.

        Arguments are those of ``Engine.serve``.

        Raises:
          ValueError: for a prompt that is empty, too long or holds an id that is none of the model's, an answer longer
            than the cache has room for, or a sampling parameter out of range. The cache is then unchanged.
        """
        check_sampling(temperature, top_p, seed, stop_tokens)
        check_names(namespace, adapter, ())
        if not isinstance(max_new_tokens, int | np.integer) or not 0 <= max_new_tokens <= self.config.max_new_tokens:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} is outside 0..max_new_tokens={self.config.max_new_tokens}"
            )
        chosen = ((temperature, np.float32), (top_p, np.float32), (seed, np.int32))
        sampling = Sampling(*(jax.device_put(np.asarray([value], kind)) for value, kind in chosen))
        tokens = self._checked(tokens)
        self.clock += 1
        key = key_bytes("snapshots", namespace, self.model.digest, adapter, self.config.block)
        root = self.roots.get(key) or Node(np.empty(0, np.int32), None, None, None, self.clock)
        path = self._path(root, key, tokens) if self.policy.exact else []
        state = self._restored(path)
        block, parent, kept = self.config.block, path[-1] if path else root, []
        for begin in range(len(path) * block, len(tokens), block):
            part = tokens[begin : begin + block]
            logits, state = self.model.prefill(part[None], state, block=block)
            if self.policy.register and len(part) == block:
                parent = self._node(parent, part, state, begin)
                kept.append(parent)
        if kept and all_finite(logits):  # else whoever is served from them would be lost, too
            self.roots[key], parent = root, path[-1] if path else root
            for node in kept:
                parent = self._attach(parent, node, key)
            self._evict()
        served = len(path) * block
        answer = self._generate(logits, state, sampling, max_new_tokens, stop_tokens)
        return SnapshotResponse(np.asarray(logits[0]), {"exact": served, "computed": len(tokens) - served}, answer)

    def forget(self, text: np.ndarray, *, namespace: str | None = None) -> int:
        """Removes every block that holds a token of ``text`` and all behind it; returns how many tokens went.

        A block that ends with the beginning of ``text`` goes too: whether a prompt went on with the rest is not kept.

        Args:
          namespace: of one tenant; None means all.

        Raises:
          ValueError: for what is no run of token ids.
        """
        text = as_token_ids("text", text)
        if text.size == 0:
            raise ValueError("text is empty; give the tokens to forget")
        check_token_ids(text, self.model)
        removed = 0
        for key, root in self.roots.items():
            if namespace is not None and not key.startswith(key_bytes("snapshots", namespace)):
                continue
            for node, above in list(_walk(root, np.empty(0, np.int32))):
                if node.parent is None or not _attached(node):
                    continue
                path = np.concatenate([above, node.tokens])
                if _touches(path, text, len(above)):
                    removed += self._remove(node)
        return removed

    def _checked(self, tokens: np.ndarray) -> Int32[np.ndarray, " T"]:
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"tokens has shape {tokens.shape} and dtype {tokens.dtype}; a prompt is a 1-d array of one or more ids"
            )
        if tokens.size > self.config.max_prompt_tokens:
            raise ValueError(
                f"tokens holds {tokens.size} tokens, more than max_prompt_tokens={self.config.max_prompt_tokens}; "
                "raise it or shorten"
            )
        if tokens.min() < 0 or tokens.max() >= self.model.vocab_size:
            raise ValueError(
                f"tokens holds an id outside 0..{self.model.vocab_size - 1}: {tokens.min()} or {tokens.max()}; check "
                "the tokenizer"
            )
        return tokens.astype(np.int32)

    def _generate(
        self, logits: Any, state: Any, sampling: Sampling, count: int, stop_tokens: tuple[int, ...]
    ) -> list[int]:
        """Up to ``count`` tokens, each through the recurrent layers once; no snapshot is kept of an answer."""
        tokens: list[int] = []
        while len(tokens) < count:
            if tokens:
                logits, state = self.model.prefill(np.asarray([tokens[-1:]], np.int32), state, block=1)
            tokens.append(int(_sample(logits, sampling, np.asarray([state.length], np.int32))[0]))
            if tokens[-1] in stop_tokens:
                break
        return tokens

    def _path(self, root: Node, key: bytes, tokens: Int32[np.ndarray, " T"]) -> list[Node]:
        """The stored blocks the prompt begins with. Its last token is always computed: somebody has to give logits."""
        path, node, block = [], root, self.config.block
        for begin in range(0, (len(tokens) - 1) // block * block, block):
            part = tokens[begin : begin + block]
            found = [
                child for child in node.children.get(fingerprint(key, part), []) if np.array_equal(child.tokens, part)
            ]
            if not found:
                break
            node = found[0]
            node.last_used = self.clock
            path.append(node)
        return path

    def _restored(self, path: list[Node]) -> Any:
        """The state behind the blocks of a path."""
        block = self.config.block
        room = -(-self.config.max_prompt_tokens // block) * block + self.config.max_new_tokens
        state = self.model.empty_state(1, room)
        if not path:
            return state
        rows = state.rows
        for index, node in enumerate(path):
            rows = _place(rows, node.rows, np.int32(index * block))
        return dataclasses.replace(state, length=np.int32(len(path) * block), memories=path[-1].memories, rows=rows)

    def _node(self, parent: Node, tokens: Int32[np.ndarray, " block"], state: Any, begin: int) -> Node:
        rows = _cut(state.rows, np.int32(begin), size=len(tokens))
        return Node(tokens, state.memories, rows, parent, self.clock)

    def _attach(self, parent: Node, node: Node, key: bytes) -> Node:
        """Keeps a block behind another; returns the one that is kept."""
        siblings = parent.children.setdefault(fingerprint(key, node.tokens), [])
        for other in siblings:
            if np.array_equal(other.tokens, node.tokens):
                return other  # a policy that looks nothing up has computed it again
        node.parent = parent
        siblings.append(node)
        self.nbytes += node.nbytes
        return node

    def _evict(self) -> None:
        """Leaves go until the rest fits: a block is worth nothing without those to its left."""
        while self.nbytes > self.config.capacity_bytes:
            leaves = [
                node
                for root in self.roots.values()
                for node, _ in _walk(root, None)
                if node.parent and not node.children
            ]
            self._remove(min(leaves, key=lambda node: node.last_used))
            self.evicted += 1

    def _remove(self, node: Node) -> int:
        """Takes a node and everything behind it out; returns their tokens."""
        assert node.parent is not None
        gone = [below for below, _ in _walk(node, None)]
        self.nbytes -= sum(below.nbytes for below in gone)
        children = node.parent.children
        for mark, siblings in list(children.items()):
            children[mark] = [other for other in siblings if other is not node]
            if not children[mark]:
                del children[mark]
        return sum(len(below.tokens) for below in gone)


_sample = jax.jit(sample)


@partial(jax.jit, donate_argnums=0)
def _place(rows: Any, part: Any, begin: Int32[Any, ""]) -> Any:
    """Rows of a block written into buffers, in place."""
    return jax.tree.map(lambda whole, own: jax.lax.dynamic_update_slice_in_dim(whole, own, begin, axis=1), rows, part)


@partial(jax.jit, static_argnames="size")
def _cut(rows: Any, begin: Int32[Any, ""], *, size: int) -> Any:
    """A copy of the rows of a block."""
    return jax.tree.map(lambda whole: jax.lax.dynamic_slice_in_dim(whole, begin, size, axis=1), rows)


def check_policy(model: Any, policy: Policy) -> None:
    """Raises ``ValueError`` for a policy that recurrent memories cannot serve."""
    if policy.shifted == "serve":
        try:
            _ = model.row_format
        except ValueError as error:
            raise ValueError(f"policy={policy.name!r} serves shifted rows: {error}; use policy='prefix'") from None
    if policy.exact_granularity != 1:
        raise ValueError(
            f"policy={policy.name!r} cuts exact prefixes at multiples of {policy.exact_granularity} tokens, but "
            "snapshots stand at the ends of blocks; use policy='prefix'"
        )


def _walk(node: Node, above: Any) -> Iterator[tuple[Node, Any]]:
    """Every node below and including this one, with the tokens to its left if those of the first are given."""
    yield node, above
    behind = None if above is None else np.concatenate([above, node.tokens])
    for siblings in list(node.children.values()):
        for child in siblings:
            yield from _walk(child, behind)


def _attached(node: Node) -> bool:
    """Whether a node can still be reached from its root."""
    while node.parent is not None:
        if not any(node in siblings for siblings in node.parent.children.values()):
            return False
        node = node.parent
    return True


def _touches(path: np.ndarray, text: np.ndarray, begin: int) -> bool:
    """Whether ``text`` occurs in ``path``, or its beginning at the end of it, with a token at or behind ``begin``."""
    if any(np.array_equal(path[-size:], text[:size]) for size in range(1, min(len(text), len(path) + 1))):
        return True
    if len(path) < len(text):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(path, len(text))
    found = np.flatnonzero((windows == text).all(axis=1))
    return bool((found + len(text) > begin).any())
