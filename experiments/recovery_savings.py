"""What reuse saves a model of a given shape: expected operations of prefill, bytes and money. No model is run."""

import dataclasses
import math

import jax
import numpy as np
from jaxtyping import Bool

from models import families
from pallas_kernels.rotated_latent_attention.attention_cost import absorbed_flops, expanded_flops


@dataclasses.dataclass(frozen=True)
class Shape:
    """What prefill of one token costs.

    Fields:
      weights: of the products a token passes: the experts it is routed to, no embedding, and neither the unembedding
        (of the last token only) nor, for MLA, ``W_UK`` and ``W_UV`` (part of attention).
      row_bytes: of one token's cache rows in bfloat16, all layers.
      widths: of attention's heads, as ``attention_cost`` takes them; None for grouped-query attention.
      pair_flops: of one query seeing one row in all layers, for grouped-query attention.
    """

    name: str
    layers: int
    weights: int
    row_bytes: int
    widths: dict[str, int] | None
    pair_flops: int

    def prefill_flops(self, tokens: int, computed: int, pairs: int) -> int:
        """Operations of a prompt of ``tokens``, of which ``computed`` are computed and see ``pairs`` rows together
        (``sum of position + 1``). MLA attends in the cheaper of its two forms."""
        linear = 2 * self.weights * computed
        if self.widths is None or not computed:
            return linear + self.pair_flops * pairs
        # Both counts are bilinear in queries and rows: pairs enter as queries of one row each, without projections.
        per_pair = {
            "absorbed": absorbed_flops(1, 1, **self.widths) - absorbed_flops(1, 0, **self.widths),
            "expanded": expanded_flops(1, 1, **self.widths) - expanded_flops(0, 1, **self.widths),
        }
        absorbed = per_pair["absorbed"] * pairs + absorbed_flops(computed, 0, **self.widths)
        expanded = per_pair["expanded"] * pairs + expanded_flops(0, tokens, **self.widths)
        return linear + self.layers * min(absorbed, expanded)


@dataclasses.dataclass
class Savings:
    """Totals over requests, by shape."""

    full: int = 0
    saved: int = 0
    reused_tokens: int = 0

    def add(self, shape: Shape, reused: Bool[np.ndarray, " T"]) -> None:
        """Counts one prompt of which ``reused`` came from the cache."""
        tokens, computed = len(reused), np.flatnonzero(~reused)
        full = shape.prefill_flops(tokens, tokens, tokens * (tokens + 1) // 2)
        self.full += full
        self.saved += full - shape.prefill_flops(tokens, len(computed), int(computed.sum()) + len(computed))
        self.reused_tokens += tokens - len(computed)


def shapes() -> list[Shape]:
    """Every preset."""
    return [shape_of(name) for name in families.presets()]


def shape_of(preset: str) -> Shape:
    """The costs of a preset, from its parameter tree."""
    family, config = families.read_config(preset)
    tree = jax.tree_util.tree_leaves_with_path(family.parameters(config), is_leaf=families.is_parameter)
    weights = 0
    for path, parameter in tree:
        keys = [str(getattr(key, "key", key)) for key in path]
        if parameter.start != "normal" or keys[0] in ("embed", "head") or keys[-1] in ("w_uk", "w_uv"):
            continue
        size = math.prod(parameter.shape)
        if keys[0] == "moe" and keys[-2] == "mlp" and keys[-1] != "router":  # routed experts, [layers, experts, ...]
            size = size // config.n_routed_experts * config.num_experts_per_tok
        weights += size
    rows = family.row_format(config)
    row_bytes = 2 * rows.num_layers * (rows.latent_width + rows.rope_width)
    if rows.kind == "latent":
        widths = {
            "heads": config.num_attention_heads,
            "latent_width": config.kv_lora_rank,
            "key_width": config.qk_nope_head_dim,
            "value_width": config.v_head_dim,
            "rope_width": config.qk_rope_head_dim,
        }
        return Shape(preset, rows.num_layers, weights, row_bytes, widths, 0)
    pair_flops = 4 * rows.num_layers * config.num_attention_heads * config.head_dim  # scores and values
    return Shape(preset, rows.num_layers, weights, row_bytes, None, pair_flops)
