"""What a prompt costs in operations and bytes: the ideal that times and energies are compared with."""

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one model with attention in all layers.

    Fields:
      token_flops: operations of one token outside attention: twice the parameters it passes, the embedding and the head
        aside. MLA projects its own row up to keys and values here, once.
      pair_flops: operations of one query on one row, all layers and heads, in the cheaper (expanded) form.
      weight_bytes: everything that reading the model once moves; ``active_bytes`` what one token passes.
      row_bytes: one token in the cache.
    """

    token_flops: float
    pair_flops: float
    weight_bytes: float
    active_bytes: float
    row_bytes: float

    def flops(self, positions: np.ndarray) -> float:
        """Of the tokens at these positions, each attending to everything up to itself; the head left out."""
        return self.token_flops * len(positions) + self.pair_flops * float(np.sum(positions + 1.0))


def work_of(model: Any, row_itemsize: int) -> Work:
    """Counts from the parameters and head sizes of an ``mla`` or ``gqa`` model."""
    config, rows = model.config, model.row_format
    passed = float(sum(leaf.size for leaf in jax.tree.leaves(model.params)))
    embedding = float(model.vocab_size * config.hidden_size)
    whole = passed - (0 if config.tie_word_embeddings else embedding)
    passed = whole - embedding
    count = getattr(config, "n_routed_experts", None)
    if count:
        experts = 3.0 * config.moe_layers * count * config.hidden_size * config.moe_intermediate_size
        passed -= experts * (1 - config.num_experts_per_tok / count)
    if rows.kind == "latent":
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        widths = 2 * config.head_dim
    return Work(
        token_flops=2 * passed,
        pair_flops=2.0 * rows.num_layers * config.num_attention_heads * widths,
        weight_bytes=whole * model.dtype.itemsize,
        active_bytes=passed * model.dtype.itemsize,
        row_bytes=float(rows.num_layers * (rows.latent_width + rows.rope_width) * row_itemsize),
    )
