"""Models of every kind of cache, each with the same four ways to serve a prompt of a known and a new part."""

import dataclasses
import time
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.latency import QUICK_SHAPE
from experiments.names import listed
from experiments.reuse_prompts import FULL, HEADER, HIT, Server
from experiments.work import work_of
from irminsul.blocks import blocks_for
from irminsul.plan import NEW
from irminsul.policies import get_policy
from models import recurrent
from models.random_weights import random_model_on_device
from models.recurrent_cost import still_to_run

Scenario = Literal["miss", "exact", "shifted", "half"]
SCENARIOS: tuple[Scenario, ...] = ("miss", "exact", "shifted", "half")

MOST_TOGETHER = 5120  # tokens of a block that prompts share

# Dense models whose tokens pass as many parameters as DeepSeek-V2-Lite's, beside its depth and width.
GROUPED = {
    "model_type": "llama", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 11008,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "mla": "deepseek-v2-lite",
    "moonlight": "moonlight-16b-a3b",
    "gqa": GROUPED,
    "mha": {**GROUPED, "num_key_value_heads": 16},
    "mamba2": "mamba2-2.7b",
    "gdn": "qwen3-next-41b-a3b",
    "kda": "kimi-linear-48b-a3b",
}
RECURRENT = ("mamba2", "gdn", "kda")
QUICK_GROUPED = {
    "vocab_size": 1009, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 32,
}  # fmt: skip
QUICK_SHAPES: dict[str, Any] = {
    "mla": QUICK_SHAPE,
    "moonlight": QUICK_SHAPE,
    "gqa": {**QUICK_GROUPED, "num_key_value_heads": 2},
    "mha": {**QUICK_GROUPED, "num_key_value_heads": 4},
    "mamba2": {
        "vocab_size": 1009, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 32, "state_size": 16,
    },
}  # fmt: skip


class Unfit(ValueError):
    """A case that this model, cache or device cannot hold; the sentence says why."""


class Subject(Protocol):
    """A model behind whatever cache it allows."""

    name: str

    @property
    def parameters(self) -> int: ...

    def prepare(self, cached: int, fresh: int, batch: int) -> None:
        """Caches ``batch`` documents, ready for prompts of ``cached`` tokens of one and ``fresh`` new ones.

        Raises:
          Unfit: where there is no room.
        """

    def serve(self, scenario: Scenario, seconds: float = 0.0) -> tuple[Any, int]:
        """Logits to wait for, the last of a queue of batches that is ``seconds`` long or one batch, and how many
        batches there were.

        Raises:
          Unfit: where the model cannot be served so.
        """

    def work(self, scenario: Scenario) -> tuple[float, float]:
        """Operations and bytes of that batch."""


@dataclasses.dataclass
class AttentionSubject:
    """A model with rows of a token a layer, served by this project's cache, prompt after prompt."""

    name: str
    server: Server
    rng: np.random.Generator
    documents: list[np.ndarray] = dataclasses.field(default_factory=list)
    cached: int = 0
    fresh: int = 0
    plan: Any = None

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.server.model.params))

    def prepare(self, cached: int, fresh: int, batch: int) -> None:
        config, limit = self.server.cache.config, self.server.model.max_position
        room = min(config.max_prompt_tokens, limit)
        if cached + max(fresh, HEADER) > room:
            raise Unfit(f"prompts of {cached + fresh} tokens exceed the {room} of the model and the cache")
        needed = batch * (cached + HEADER + fresh) + 2 * (cached + fresh)
        if needed > 0.9 * config.num_pages * config.page_size:
            raise Unfit(f"{batch} documents of {cached} tokens exceed a pool of {config.num_pages * config.page_size}")
        self.cached, self.fresh = cached, fresh
        self.documents = [self._new(cached + HEADER) for _ in range(batch)]
        together, segment = self._shared("miss")
        self.server.serve_in_a_row(self.documents, get_policy("irminsul"), together=together, segment=segment)

    def serve(self, scenario: Scenario, seconds: float = 0.0) -> tuple[Any, int]:
        policy = FULL if scenario == "miss" else HIT
        if scenario == "half":
            policy = dataclasses.replace(HIT, repair="leading", repair_tokens=self.cached // 2)
        together, segment = self._shared(scenario)
        logits, self.plan, batches = self.server.serve_queue(
            lambda: (self._prompt(scenario, document) for document in self.documents),
            policy, seconds, together=together, segment=segment,
        )  # fmt: skip
        return logits, batches

    def _shared(self, scenario: Scenario) -> tuple[int, int]:
        """How many prompts of a batch share a block, and the tokens that each leaves to compute, of which a block
        takes ``MOST_TOGETHER``. Longer prompts are cut into blocks."""
        whole = self.cached + max(self.fresh, HEADER)
        tokens = {"miss": whole, "half": self.cached // 2 + self.fresh}.get(scenario, self.fresh)
        if tokens > MOST_TOGETHER:
            return 1, 0
        return min(len(self.documents), MOST_TOGETHER // tokens), tokens

    def _prompt(self, scenario: Scenario, document: np.ndarray) -> np.ndarray:
        if scenario == "exact":
            return np.concatenate([document[: self.cached], self._new(self.fresh)])
        head = self._new(max(self.fresh // 8, HIT.sink_tokens))
        known = document[HEADER:] if scenario != "miss" else self._new(self.cached)
        return np.concatenate([head, known, self._new(self.fresh - len(head))])

    def work(self, scenario: Scenario) -> tuple[float, float]:
        assert self.server.cache.pool is not None
        counted = work_of(self.server.model, jnp.dtype(self.server.cache.config.dtype).itemsize)
        computed = np.flatnonzero(self.plan.bin_of_token >= NEW)
        largest = max(MOST_TOGETHER, *(block.tokens for block in blocks_for(self.server.model, "fast")))
        together, _ = self._shared(scenario)
        blocks = -(-len(computed) // largest)
        read = blocks / together * (min(counted.weight_bytes, len(computed) * counted.active_bytes))
        rows = blocks * self.plan.length * counted.row_bytes
        batch = len(self.documents)
        return batch * counted.flops(computed), batch * (read + rows)

    def _new(self, count: int) -> np.ndarray:
        return self.rng.integers(0, self.server.model.vocab_size, count, dtype=np.int32)


@dataclasses.dataclass
class RecurrentSubject:
    """A model with recurrent layers: an exact prefix is served from a snapshot; of a shifted one only the rows of
    attention layers are there, and every token runs through everything below the last recurrent layer."""

    name: str
    model: recurrent.RecurrentModel
    rng: np.random.Generator
    sizes: tuple[int, int, int] = (0, 0, 0)
    empty: Any = None
    behind: Any = None
    state: Any = None
    known: np.ndarray | None = None

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.model.params))

    def prepare(self, cached: int, fresh: int, batch: int) -> None:
        self.sizes = (cached, fresh, batch)
        self.known = self._new(cached)
        state = recurrent.empty_state(self.model, batch, cached + fresh)
        self.empty = recurrent.snapshot(state)
        _, self.state = recurrent.prefill(self.model, self.known, state)
        self.behind = recurrent.snapshot(self.state)

    def serve(self, scenario: Scenario, seconds: float = 0.0) -> tuple[Any, int]:
        cached, fresh, _ = self.sizes
        if scenario == "half" or (scenario == "shifted" and not any(rows is not None for rows in self.state.rows)):
            raise Unfit("no rows of tokens: every token runs, as in a miss")
        started, batches, before = time.perf_counter(), 0, None
        while not batches or time.perf_counter() - started < seconds:
            if scenario == "exact":
                start, tokens, reused = self.behind, self._new(fresh), 0
            else:
                start, tokens = self.empty, np.concatenate([self.known, self._new(fresh)], axis=1)
                reused = cached if scenario == "shifted" else 0
            state = recurrent.rewind(self.state, start)
            logits, self.state = recurrent.prefill(self.model, tokens, state, reused=reused)
            jax.block_until_ready(before)  # one batch ahead, as prompts of a cache are planned
            before, batches = logits, batches + 1
        return logits, batches

    def work(self, scenario: Scenario) -> tuple[float, float]:
        cached, fresh, batch = self.sizes
        left = still_to_run(self.model.family, self.model.config, cached, fresh)
        flops = {"miss": left.miss, "exact": left.exact}.get(scenario, left.shifted)
        tokens = fresh if scenario == "exact" else cached + fresh
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self.model.params))
        return batch * flops, -(-tokens // recurrent.BLOCK) * weights

    def _new(self, count: int) -> np.ndarray:
        return self.rng.integers(0, self.model.vocab_size, (self.sizes[2], count), dtype=np.int32)


def create(
    name: str, *, quick: bool, dtype: str, seed: int, pool_bytes: float, longest: int, blocks: str = ""
) -> Subject:
    """The model of a name in ``SHAPES`` with random weights, and its cache. ``blocks``: sizes to compile, if not all.

    Raises:
      Unfit: where a quick run has no small shape of it.
    """
    rng = np.random.default_rng(seed)
    changes = QUICK_SHAPES.get(name) if quick else {}
    if changes is None:
        raise Unfit("has no small shape for a quick run")
    if name in RECURRENT:
        return RecurrentSubject(name, recurrent.random_model(SHAPES[name], seed, jnp.dtype(dtype), **changes), rng)
    model = random_model_on_device(SHAPES[name], seed, jnp.dtype(dtype), **changes)
    tokens = min(1 << 20, int(pool_bytes / work_of(model, jnp.dtype(dtype).itemsize).row_bytes)) // 64 * 64
    longest = min(longest, model.max_position)
    server = Server.create(model, pool_tokens=tokens, max_prompt_tokens=longest, dtype=dtype)
    server.sizes = tuple(int(text) for text in listed(blocks))
    return AttentionSubject(name, server, rng)
