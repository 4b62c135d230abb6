"""Mixtures of experts as DeepSeek routes them: arXiv 2405.04434 section 2.2 (V2), 2412.19437 section 2.1.2 (V3)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.config import MLAConfig
from models.layers import swiglu
from models.sharded_experts import columns_of_shared, experts_on_mesh
from pallas_kernels.experts_swiglu.api import Implementation, experts_swiglu, takes_kernel
from pallas_kernels.mesh_axes import EXPERT, TENSOR, split_axes
from pallas_kernels.rotated_latent_attention.api import hopper_available

COUNTED_EXPERTS, COUNTED_TOKENS = 128, 4096


def route(
    x: Float[Array, "M D"], router: Float[Array, "D E"], bias: Float[Array, " E"] | None, config: MLAConfig
) -> tuple[Int[Array, "M K"], Float[Array, "M K"]]:
    """Experts of each token and their float32 weights, scaled by ``routed_scaling_factor``.

    Scores are sigmoids or a softmax of the logits (``scoring_func``). ``greedy`` takes the largest,
    ``group_limited_greedy`` those within the ``topk_group`` groups that hold the largest ones, ``group_limited_top2``
    within the groups whose best two have the largest sum. ``noaux_tc`` chooses as the latter by score plus ``bias`` and
    weights by the score alone: the bias balances load and takes no part in the output.
    """
    assert config.num_experts_per_tok is not None
    logits = _float32_logits(x, router)
    scores = jax.nn.sigmoid(logits) if config.scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    if config.topk_method == "noaux_tc":
        assert bias is not None
        choice = scores + jnp.broadcast_to(bias, scores.shape)
        choice = jnp.where(_in_kept_groups(choice, config, ranked_by=2), choice, -jnp.inf)
        experts = largest(choice, config.num_experts_per_tok)
    else:
        choice = scores
        if config.topk_method != "greedy":
            ranked_by = 2 if config.topk_method == "group_limited_top2" else 1
            choice = jnp.where(_in_kept_groups(choice, config, ranked_by=ranked_by), choice, 0.0)
        experts = largest(choice, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, weights * config.routed_scaling_factor


def largest(choice: Float[Array, "M E"], count: int) -> Int[Array, "M K"]:
    """Indices of the ``count`` largest of each row, largest first and the first of equals, as ``lax.top_k``.

    On a GPU ``top_k`` sorts each row; counting what is larger than each is one pass, and picking by rank another.
    """
    tokens, experts = choice.shape
    if not hopper_available() or experts > COUNTED_EXPERTS:
        return jax.lax.top_k(choice, count)[1]
    # Of more tokens at once XLA writes a kernel that takes 287 us for 5,120 of them instead of 18 for 4,096.
    pieces = -(-tokens // COUNTED_TOKENS)
    return jnp.concatenate([_largest(piece, count) for piece in jnp.array_split(choice, pieces)])


def _largest(choice: Float[Array, "M E"], count: int) -> Int[Array, "M K"]:
    experts = choice.shape[1]
    index = jnp.arange(experts, dtype=jnp.int32)
    mine, other = choice[:, :, None], choice[:, None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, None, :] < index[None, :, None]))
    rank = jnp.sum(ahead, axis=2, dtype=jnp.int32)
    picked = jnp.where(rank[:, None, :] == jnp.arange(count)[None, :, None], index[None, None], 0)
    return jnp.minimum(jnp.sum(picked, axis=2, dtype=jnp.int32), experts - 1)


def _float32_logits(x: Float[Array, "M D"], router: Float[Array, "D E"]) -> Float[Array, "M E"]:
    """Products of bfloat16 numbers are exact in float32: the matrix unit, which adds them up there, loses nothing."""
    if x.dtype == router.dtype == jnp.bfloat16:
        return jnp.einsum("MD,DE->ME", x, router, preferred_element_type=jnp.float32)
    wide = x.astype(jnp.float32), router.astype(jnp.float32)
    return jnp.einsum("MD,DE->ME", *wide, precision=jax.lax.Precision.HIGHEST)


def _in_kept_groups(choice: Float[Array, "M E"], config: MLAConfig, *, ranked_by: int) -> Array:
    """Whether each expert is in one of the ``topk_group`` best groups, ranked by their best ``ranked_by`` experts."""
    groups = config.n_group or 1
    tokens, experts = choice.shape
    best = jax.lax.top_k(choice.reshape(tokens, groups, experts // groups), ranked_by)[0]
    kept = jax.lax.top_k(jnp.sum(best, axis=-1), config.topk_group or 1)[1]
    mask = jnp.any(jax.nn.one_hot(kept, groups, dtype=jnp.bool), axis=1)
    return jnp.repeat(mask, experts // groups, axis=-1)


EXPERT_MATRICES = ("gate", "up", "down")


def keeps_experts_whole(stack: dict[str, Any], dtype: jax.typing.DTypeLike, kv: Any) -> bool:
    """Whether a stack of MoE layers should hand the experts of all its layers to ``mixture`` at once.

    A kernel reads one layer's experts where they are; cut out for it they would be copied. XLA takes them cut out, and
    is what runs behind any view but one that only serves: the kernel has no derivative and no batching rule.
    """
    return getattr(kv, "serves", False) and takes_kernel(dtype, stack["mlp"]["gate"])


def without_experts(stack: dict[str, Any], dtype: jax.typing.DTypeLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """A stack of MoE layers without the matrices of its routed experts, and those; shared experts go along where the
    kernel takes them, too: on a mesh, a device's columns of them."""
    feed = stack["mlp"]
    experts = {name: feed[name] for name in EXPERT_MATRICES}
    if "shared" in feed:
        gate = feed["shared"]["gate"]
        columns = columns_of_shared(gate.shape[-1])
        if columns and takes_kernel(dtype, jax.ShapeDtypeStruct((len(gate), 1, gate.shape[1], columns), gate.dtype)):
            experts["shared"] = feed["shared"]
    rest = {name: leaf for name, leaf in feed.items() if name not in experts}
    return {**stack, "mlp": rest}, experts


def mixture(
    x: Float[Array, "M D"],
    params: dict[str, Any],
    config: MLAConfig,
    *,
    stacked: dict[str, Any] | None = None,
    layer: Int[Array, ""] | None = None,
    valid: Bool[Array, " M"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "M D"]:
    """The feed-forward of a MoE layer: routed experts plus shared ones.

    Args:
      x: hidden states.
      params: of the layer, without what is in ``stacked``.
      stacked: matrices of the experts of all layers (``without_experts``), of which this is number ``layer``.
      valid: tokens that are not padding; what comes out for the others means nothing.
      implementation: of the routed experts; see ``experts_swiglu``.
    """
    experts, weights = route(x, params["router"], params.get("router_bias"), config)
    unused = experts >= (config.n_routed_experts or 0)  # experts that return their input
    if config.zero_expert_num:
        kept = jnp.sum(jnp.where(unused, weights, 0.0), axis=-1)
        experts, weights = jnp.where(unused, 0, experts), jnp.where(unused, 0.0, weights)
    matrices = [(params if stacked is None else stacked)[name] for name in EXPERT_MATRICES]
    shared = ({**params, **(stacked or {})})["shared"] if config.n_shared_experts else None
    all_pass = None if shared is None else tuple(shared[name] for name in EXPERT_MATRICES)
    on_mesh = bool(split_axes(EXPERT, TENSOR))
    if all_pass is not None and on_mesh:
        along = all_pass if columns_of_shared(all_pass[0].shape[-1]) else None
    else:
        along = all_pass if stacked is not None and "shared" in stacked else None
    routed = (experts_on_mesh if on_mesh else experts_swiglu)(
        x, experts, weights, *matrices, layer=layer, valid=valid, shared=along, implementation=implementation
    )
    if config.zero_expert_num:
        routed = routed + (x.astype(jnp.float32) * kept[:, None]).astype(x.dtype)
    if all_pass is None or along is not None:
        return routed
    return routed + swiglu(x, *all_pass)
