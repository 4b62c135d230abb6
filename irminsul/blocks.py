"""How prefill is cut into blocks, and the cost by which a block and its attention form are chosen.

A block is a number of tokens sent through all layers together. Large blocks amortise the up-projection of the expanded
form, small ones waste less on padding. The choice is made inside the compiled program, per block, from what is left to
compute and how many rows are visible.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from irminsul.view import Form

Mode = Literal["deterministic", "fast"]


@dataclasses.dataclass(frozen=True)
class Block:
    """``tokens`` a block, attending in ``form``."""

    tokens: int
    form: Form


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Work of one block in multiply-adds: ``tokens * (fixed + rows * per_pair) + rows * per_row``.

    ``fixed`` is the model without attention; the others are indexed by form. Counted are the products, and what passes
    over scores and rows cost beside them (``SCORE_WORK``, ``ROW_WORK``).
    """

    fixed: float
    per_pair: dict[str, float]
    per_row: dict[str, float]

    def __hash__(self) -> int:
        return hash((self.fixed, *self.per_pair.items(), *self.per_row.items()))

    def __call__(self, block: Block, tokens: Int[Array, ""], rows: Int[Array, ""]) -> Float[Array, ""]:
        """Work a computed token when ``tokens`` of the block are real and the last of them sees ``rows`` rows."""
        rows = rows.astype(jnp.float32)
        work = block.tokens * (self.fixed + rows * self.per_pair[block.form]) + rows * self.per_row[block.form]
        return work / tokens.astype(jnp.float32)


# Multiply-adds that one score (mask, exponential, rescaling) and one value of a gathered row cost in time. Fitted on
# two Xeon cores, float32, to the times in ``pallas_kernels/rotated_latent_attention/attention_cost.py``: a block over
# 4096 rows takes as long as 8 queries longer in the absorbed form, and a query of the expanded form 0.31 of an
# absorbed one.
SCORE_WORK = 200.0
ROW_WORK = 140.0

DETERMINISTIC_BLOCKS = (Block(64, "absorbed"),)
LATENT_BLOCKS = (Block(16, "absorbed"), Block(64, "absorbed"), Block(256, "expanded"), Block(1024, "expanded"))
GROUPED_BLOCKS = tuple(Block(tokens, "absorbed") for tokens in (16, 64, 256, 1024))


def blocks_for(model: Any, mode: Mode) -> tuple[Block, ...]:
    """The blocks a compiled prefill may use.

    Raises:
      ValueError: for an unknown mode.
    """
    if mode not in ("deterministic", "fast"):
        raise ValueError(f"mode={mode!r} is unknown; choose 'deterministic' or 'fast'")
    if mode == "deterministic":
        return DETERMINISTIC_BLOCKS
    return LATENT_BLOCKS if model.row_format.kind == "latent" else GROUPED_BLOCKS


def cost_model(model: Any) -> CostModel:
    """Counts the work of a model's blocks from its parameters and the head sizes in its config."""
    config, rows = model.config, model.row_format
    fixed = float(sum(leaf.size for leaf in jax.tree.leaves(model.params)))
    fixed -= model.vocab_size * config.hidden_size  # the embedding is a lookup and the head runs once
    heads = rows.num_layers * config.num_attention_heads
    gather = rows.num_layers * (rows.latent_width + rows.rope_width) * ROW_WORK
    if rows.kind == "grouped":
        width = rows.rope_width // rows.rope_heads
        return CostModel(fixed, {"absorbed": heads * (2 * width + SCORE_WORK)}, {"absorbed": gather})
    up = config.qk_nope_head_dim + config.v_head_dim
    return CostModel(
        fixed,
        per_pair={
            "absorbed": heads * (2 * rows.latent_width + rows.rope_width + SCORE_WORK),
            "expanded": heads * (up + rows.rope_width + SCORE_WORK),
        },
        per_row={"absorbed": gather, "expanded": gather + heads * float(up * rows.latent_width)},
    )


def choose_block(
    blocks: tuple[Block, ...],
    cost: CostModel,
    positions: Int[Array, " P"],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> Int[Array, ""]:
    """Index of the block with the least work a computed token, for the tokens from ``start`` on.

    ``positions`` are those of the ``count`` computed tokens. A block that reaches over a reused span makes all its
    tokens pay for the rows that its last one sees, which is why a short block before the gap can be the cheaper one.
    """

    def work(block: Block) -> Float[Array, ""]:
        end = jnp.minimum(start + block.tokens, count)
        return cost(block, end - start, positions[end - 1] + 1)

    return jnp.argmin(jnp.stack([work(block) for block in blocks]))
