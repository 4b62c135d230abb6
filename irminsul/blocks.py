"""How prefill is cut into blocks, and the cost by which a block and its attention form are chosen.

A block is a number of tokens sent through all layers together. Large blocks amortise the up-projection of the expanded
form, small ones waste less on padding. The choice is made inside the compiled program, per block, from what is left to
compute and how many rows are visible.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from irminsul.view import Form
from pallas_kernels.rotated_latent_attention.api import hopper_available

Mode = Literal["deterministic", "fast"]


@dataclasses.dataclass(frozen=True)
class Block:
    """``tokens`` a block, attending in ``form``."""

    tokens: int
    form: Form


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Work of one block in multiply-adds: ``tokens * fixed + real * routed + weights + tokens * rows * per_pair +
    rows * per_row``, of ``tokens`` of which ``real`` are no padding.

    ``fixed`` is the model without attention, ``routed`` the part of it that skips padding, ``weights`` what reading all
    parameters once takes, in multiply-adds of the same time; ``per_pair`` and ``per_row`` are indexed by form. Counted
    are the products, and what passes over scores and rows cost beside them (``SCORE_WORK``, ``ROW_WORK``).

    With ``causal``, where kernels leave out what a query does not see, pairs cost the same in any block: only what a
    form takes more than the cheapest one counts.
    """

    fixed: float
    per_pair: dict[str, float]
    per_row: dict[str, float]
    routed: float = 0.0
    weights: float = 0.0
    causal: bool = False

    def __hash__(self) -> int:
        alone = (self.fixed, self.routed, self.weights, self.causal)
        return hash((*alone, *self.per_pair.items(), *self.per_row.items()))

    def __call__(
        self,
        blocks: tuple[Block, ...],
        tokens: Float[Array, "K 1"],
        rows: Float[Array, "K 1"],
        visible: Float[Array, "K 1"],
    ) -> Float[Array, "K N"]:
        """Work of each of ``N`` blocks at ``K`` places, of whose tokens so many are real, the last of them sees
        ``rows`` rows, and all of them together see ``visible``."""
        size, per_pair, per_row = (
            jnp.asarray(values, jnp.float32)[None]
            for values in (
                [block.tokens for block in blocks],
                [self.per_pair[block.form] for block in blocks],
                [self.per_row[block.form] for block in blocks],
            )
        )
        model = size * self.fixed + tokens * self.routed + self.weights
        beyond = per_pair - min(self.per_pair.values())
        pairs = visible * beyond if self.causal else size * rows * per_pair
        return model + pairs + rows * per_row


# Multiply-adds that one score (mask, exponential, rescaling) and one value of a gathered row cost in time. Fitted on
# two Xeon cores, float32, to the times in ``pallas_kernels/rotated_latent_attention/attention_cost.py``: a block over
# 4096 rows takes as long as 8 queries longer in the absorbed form, and a query of the expanded form 0.31 of an
# absorbed one.
SCORE_WORK = 200.0
ROW_WORK = 140.0

DETERMINISTIC_BLOCKS = (Block(64, "absorbed"),)
LATENT_BLOCKS = (Block(16, "absorbed"), Block(64, "absorbed"), Block(256, "expanded"), Block(1024, "expanded"))
GROUPED_BLOCKS = tuple(Block(tokens, "absorbed") for tokens in (16, 64, 256, 1024))

# On a Hopper GPU a small block takes as long as reading the weights, and the kernels skip padding queries. The expanded
# kernel fills the GPU from some 512 queries of 16 heads on (``docs/benchmarks/rotated_latent_attention.md``). Large
# blocks lie close together: what is no kernel of ours computes padding, too. The largest one takes in what would be
# left over of a few blocks of 4,096, and would have to project all rows up once more.
HOPPER_LATENT_BLOCKS = (
    *(Block(tokens, "absorbed") for tokens in (64, 256)),
    *(Block(tokens, "expanded") for tokens in (512, 1024, 1792, 2560, 3328, 4096, 5120)),
)
HOPPER_GROUPED_BLOCKS = tuple(Block(block.tokens, "absorbed") for block in HOPPER_LATENT_BLOCKS)
# Multiply-adds a second over bytes a second of one H200: 350e12 / 4.2e12 (both measured, sustained).
HOPPER_WORK_PER_BYTE = 83.0
# There the kernels work on scores beside the products: a query and row of 16 heads takes 3.9 times as long absorbed as
# expanded (58.7 and 15.2 ps, ``docs/benchmarks``), and the products alone say 3.4. The absorbed kernel reads pages as
# they lie; what the expanded one gathers and turns took 84 us for 33,792 rows of 576 values, at 320e12 a second.
HOPPER_SCORE_WORK = 0.0
HOPPER_ROW_WORK = {"absorbed": 0.0, "expanded": 1400.0}


def blocks_for(model: Any, mode: Mode) -> tuple[Block, ...]:
    """The blocks a compiled prefill may use.

    Raises:
      ValueError: for an unknown mode.
    """
    if mode not in ("deterministic", "fast"):
        raise ValueError(f"mode={mode!r} is unknown; choose 'deterministic' or 'fast'")
    if mode == "deterministic":
        return DETERMINISTIC_BLOCKS
    if on_hopper(model):
        return HOPPER_LATENT_BLOCKS if model.row_format.kind == "latent" else HOPPER_GROUPED_BLOCKS
    return LATENT_BLOCKS if model.row_format.kind == "latent" else GROUPED_BLOCKS


def on_hopper(model: Any) -> bool:
    """Whether the model is served by the Hopper kernels."""
    return hopper_available() and model.dtype == jnp.bfloat16


def cost_model(model: Any) -> CostModel:
    """Counts the work of a model's blocks from its parameters and the head sizes in its config."""
    config, rows, hopper = model.config, model.row_format, on_hopper(model)
    fixed = float(sum(leaf.size for leaf in jax.tree.leaves(model.params)))
    # The embedding is a lookup and the head runs once.
    fixed -= model.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    weights = HOPPER_WORK_PER_BYTE * model.dtype.itemsize * fixed if hopper else 0.0
    experts, routed = _routed_parameters(config)
    fixed -= experts if hopper else experts - routed
    skipped = routed if hopper else 0.0
    heads, score = rows.num_layers * config.num_attention_heads, HOPPER_SCORE_WORK if hopper else SCORE_WORK
    row_work = HOPPER_ROW_WORK if hopper else {"absorbed": ROW_WORK, "expanded": ROW_WORK}
    values = rows.num_layers * (rows.latent_width + rows.rope_width)
    if rows.kind == "grouped":
        width = rows.rope_width // rows.rope_heads
        pairs = {"absorbed": heads * (2 * width + score)}
        # Rows of a prompt are gathered for the kernel of the expanded form.
        return CostModel(fixed, pairs, {"absorbed": values * row_work["expanded"]}, skipped, weights, hopper)
    up = config.qk_nope_head_dim + config.v_head_dim
    return CostModel(
        fixed,
        per_pair={
            "absorbed": heads * (2 * rows.latent_width + rows.rope_width + score),
            "expanded": heads * (up + rows.rope_width + score),
        },
        per_row={
            "absorbed": values * row_work["absorbed"],
            "expanded": values * row_work["expanded"] + heads * float(up * rows.latent_width),
        },
        routed=skipped,
        weights=weights,
        causal=hopper,
    )


def _routed_parameters(config: Any) -> tuple[float, float]:
    """Parameters of all routed experts, and of those that one token passes."""
    count = getattr(config, "n_routed_experts", None)
    if not count:
        return 0.0, 0.0
    experts = 3.0 * config.moe_layers * count * config.hidden_size * config.moe_intermediate_size
    return experts, experts * config.num_experts_per_tok / count


def choose_block(
    blocks: tuple[Block, ...],
    cost: CostModel,
    positions: Int[Array, " P"],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> Int[Array, ""]:
    """Index of the block to compute next, for the tokens from ``start`` on.

    ``positions`` are those of the ``count`` computed tokens. The block with the least work a computed token is taken:
    one that reaches over a reused span makes all its tokens pay for the rows that its last one sees, which is why a
    short block before the gap can be the cheaper one. Where every block reads all weights (``causal``) all that is left
    is looked at: a block is worth what cutting everything into blocks of its size costs, with the cheapest that holds
    them for the tokens left over.
    """
    seen = jnp.cumsum(positions + 1.0)
    if cost.causal:
        return _of_least_total(blocks, cost, positions, seen, start, count)
    end = jnp.minimum(start + jnp.asarray([block.tokens for block in blocks], jnp.int32), count)
    work = _work_between(blocks, cost, positions, seen, jnp.broadcast_to(start, end.shape), end)
    return jnp.argmin(jnp.diagonal(work) / (end - start).astype(jnp.float32))


def _of_least_total(
    blocks: tuple[Block, ...],
    cost: CostModel,
    positions: Int[Array, " P"],
    seen: Float[Array, " P"],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> Int[Array, ""]:
    sizes = np.array([block.tokens for block in blocks], np.int32)
    most = -(-len(positions) // sizes)
    size = np.repeat(np.arange(len(sizes)), most)  # of each piece, and which one it is
    piece = np.concatenate([np.arange(number, dtype=np.int32) for number in most])
    begin = jnp.minimum(start + piece * sizes[size], count)
    end = jnp.minimum(begin + sizes[size], count)
    work = _work_between(blocks, cost, positions, seen, begin, end)
    # What is left over takes the cheapest block that holds it, and what is not there takes nothing.
    last, holds = (end == count)[:, None], sizes[None] >= (end - begin)[:, None]
    work = jnp.where(jnp.where(last, holds, np.arange(len(sizes))[None] == size[:, None]), work, jnp.inf)
    least = jnp.where(end > begin, jnp.min(work, axis=1), 0.0)
    total = jnp.sum(jnp.where(size[None] == np.arange(len(sizes))[:, None], least[None], 0.0), axis=1)
    first = np.cumsum(most) - most
    return jnp.argmin(work[first], axis=1)[jnp.argmin(total)]


def _work_between(
    blocks: tuple[Block, ...],
    cost: CostModel,
    positions: Int[Array, " P"],
    seen: Float[Array, " P"],
    begin: Int[Array, " K"],
    end: Int[Array, " K"],
) -> Float[Array, "K N"]:
    """Work of every block for the computed tokens ``begin`` to ``end``."""
    before = jnp.where(begin > 0, seen[begin - 1], 0.0)[:, None]
    tokens, rows = (end - begin).astype(jnp.float32)[:, None], (positions[end - 1] + 1).astype(jnp.float32)[:, None]
    return cost(blocks, tokens, rows, seen[end - 1][:, None] - before)
