"""Mixtures of experts as DeepSeek routes them: arXiv 2405.04434 section 2.2 (V2), 2412.19437 section 2.1.2 (V3)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.config import MLAConfig
from models.layers import swiglu


def route(
    x: Float[Array, "M D"], router: Float[Array, "D E"], bias: Float[Array, " E"] | None, config: MLAConfig
) -> tuple[Int[Array, "M K"], Float[Array, "M K"]]:
    """Experts of each token and their float32 weights, scaled by ``routed_scaling_factor``.

    ``greedy`` takes the largest softmax scores, ``group_limited_greedy`` those within the ``topk_group`` groups that
    hold the largest ones. ``noaux_tc`` chooses by sigmoid score plus ``bias``, groups by the sum of their best two,
    and weights by the score alone: the bias balances load and takes no part in the output.
    """
    assert config.num_experts_per_tok is not None
    logits = jnp.einsum(
        "MD,DE->ME", x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if config.topk_method == "noaux_tc":
        assert bias is not None
        scores = jax.nn.sigmoid(logits)
        choice = scores + jnp.broadcast_to(bias, scores.shape)
        choice = jnp.where(_in_kept_groups(choice, config, ranked_by=2), choice, -jnp.inf)
        experts = jax.lax.top_k(choice, config.num_experts_per_tok)[1]
    else:
        scores = choice = jax.nn.softmax(logits, axis=-1)
        if config.topk_method == "group_limited_greedy":
            choice = jnp.where(_in_kept_groups(choice, config, ranked_by=1), choice, 0.0)
        experts = jax.lax.top_k(choice, config.num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, weights * config.routed_scaling_factor


def _in_kept_groups(choice: Float[Array, "M E"], config: MLAConfig, *, ranked_by: int) -> Array:
    """Whether each expert is in one of the ``topk_group`` best groups, ranked by their best ``ranked_by`` experts."""
    groups = config.n_group or 1
    tokens, experts = choice.shape
    best = jax.lax.top_k(choice.reshape(tokens, groups, experts // groups), ranked_by)[0]
    kept = jax.lax.top_k(jnp.sum(best, axis=-1), config.topk_group or 1)[1]
    mask = jnp.any(jax.nn.one_hot(kept, groups, dtype=jnp.bool), axis=1)
    return jnp.repeat(mask, experts // groups, axis=-1)


def experts_swiglu(
    x: Float[Array, "M D"],
    experts: Int[Array, "M K"],
    weights: Float[Array, "M K"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "M D"]:
    """Sum of each token's experts: tokens sorted by expert, one ragged product per matrix, and back in order.

    ``ragged_dot`` has no batching rule for shared weights: use ``jax.lax.map`` over sequences instead of ``vmap``.
    """
    tokens, chosen = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = x[order // chosen]
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    outputs = jax.lax.ragged_dot(inner, down, sizes)
    # Undoing the sort by a gather and summing over a fixed axis keeps the order of summation; a scatter-add would not.
    outputs = outputs[jnp.argsort(order)].reshape(tokens, chosen, -1)
    return jnp.einsum("MKD,MK->MD", outputs.astype(jnp.float32), weights).astype(x.dtype)


def mixture(x: Float[Array, "M D"], params: dict[str, Any], config: MLAConfig) -> Float[Array, "M D"]:
    """The feed-forward of a MoE layer: routed experts plus shared ones."""
    experts, weights = route(x, params["router"], params.get("router_bias"), config)
    routed = experts_swiglu(x, experts, weights, params["gate"], params["up"], params["down"])
    if not config.n_shared_experts:
        return routed
    shared = params["shared"]
    return routed + swiglu(x, shared["gate"], shared["up"], shared["down"])
