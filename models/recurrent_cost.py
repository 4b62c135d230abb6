"""What must run for a prompt of a model with recurrent layers, by what is cached: floating-point operations.

An exact prefix saves all work on its tokens: the memories behind it are in a snapshot. Rows of attention layers that
are served for tokens standing elsewhere save next to nothing. A memory is a function of every token before it, in
order, so each has to pass the recurrent layers anyway; to arrive there it needs the output of every layer below,
attention and experts included. What is left out is the projection of its own keys and values, and whatever stands
behind the last recurrent layer. ``prefill(..., reused=...)`` does exactly that, so the count can be held against time
and energy.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax

from models import families
from models.delta_rule import CHUNK
from models.mamba2 import CHUNK as SCAN_CHUNK
from models.recurrent import RecurrentFamily

# Projections that make the rows an attention layer keeps.
ROW_PROJECTIONS = ("key", "value", "kv_down")
EXPERT_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class LayerWork:
    """Operations of one layer for one token: what makes its rows, what depends on its position, and all the rest."""

    rows: float
    rest: float
    pair: float

    def run(self, begin: int, end: int, *, reuse: bool = False) -> float:
        """For the tokens ``[begin, end)``, each of which sees itself and all before it."""
        tokens = end - begin
        visible = (begin + 1 + end) * tokens / 2
        return tokens * (self.rest + (0.0 if reuse else self.rows)) + visible * self.pair


@dataclass(frozen=True)
class StillToRun:
    """Operations for a prompt of ``cached + fresh`` tokens, by what was found of the first ``cached``.

    ``miss``: nothing. ``exact``: the prefix, with its snapshot. ``shifted``: attention rows alone.
    """

    miss: float
    exact: float
    shifted: float

    @property
    def saved_exact(self) -> float:
        """Share of the work that an exact prefix saves."""
        return 1 - self.exact / self.miss

    @property
    def saved_shifted(self) -> float:
        """Share of the work that rows of attention layers save, at most."""
        return 1 - self.shifted / self.miss


def still_to_run(family: RecurrentFamily, config: Any, cached: int, fresh: int) -> StillToRun:
    """Operations of one sequence; an addition and a multiplication are two. Norms and other sums by channel are left
    out, and the head runs once.

    Raises:
      ValueError: unless ``cached`` is 0 or more and ``fresh`` 1 or more.
    """
    if cached < 0 or fresh < 1:
        raise ValueError(f"cached={cached} must not be negative and fresh={fresh} at least 1")
    total = cached + fresh
    work = [layer_work(family, config, layer) for layer in range(config.num_hidden_layers)]
    recurrent = [layer for layer in range(len(work)) if not family.kind(config, layer).startswith("attention")]
    head = 2.0 * config.hidden_size * config.vocab_size
    late = sum(layer.run(cached, total) for layer in work)
    early = sum(layer.run(0, cached, reuse=True) for layer in work[: recurrent[-1] + 1])
    return StillToRun(sum(layer.run(0, total) for layer in work) + head, late + head, early + late + head)


def layer_work(family: RecurrentFamily, config: Any, layer: int) -> LayerWork:
    """Operations of one layer, from the shapes of its parameters and of what it keeps."""
    tree = family.parameters(config)["layers"][layer]
    rows = rest = 0.0
    for path, parameter in jax.tree_util.tree_leaves_with_path(tree, is_leaf=families.is_parameter):
        names = [entry.key for entry in path]
        if len(parameter.shape) < 2 or names[-1] == "conv":
            continue
        operations = 2.0 * math.prod(parameter.shape)
        if len(parameter.shape) == 3 and names[-2:-1] == ["mlp"] and names[-1] in EXPERT_MATRICES:
            operations *= config.num_experts_per_tok / parameter.shape[0]
        if names[0] == "attention" and names[-1] in ROW_PROJECTIONS:
            rows += operations
        else:
            rest += operations
    if "attention" in tree:
        return LayerWork(rows, rest, _pair(tree["attention"]))
    return LayerWork(rows, rest + _recurrence(family, config), 0.0)


def _pair(attention: dict[str, Any]) -> float:
    """Scores and weighted values of one token against one row."""
    if "kv_down" in attention:  # expanded: each head has a key of its own part and the shared one
        heads, width = attention["q"].shape[1:]
        return 2.0 * heads * (width + attention["w_uv"].shape[-1])
    heads, width = attention["out"].shape[:2]
    return 4.0 * heads * width


def _recurrence(family: RecurrentFamily, config: Any) -> float:
    """The recurrence of one token in its chunked form, without projections."""
    if family.name == "mamba2":
        scores = 2.0 * SCAN_CHUNK * config.n_groups * config.state_size
        return scores + config.inner * (2.0 * SCAN_CHUNK + 4.0 * config.state_size)
    heads, key, value = jax.eval_shape(lambda: family.empty(config, "recurrent", 1, 1, "float32")).state.shape[1:]
    within = 4.0 * CHUNK * (key + value) + 2.0 * CHUNK * CHUNK / 3
    return heads * (within + 6.0 * key * value)
