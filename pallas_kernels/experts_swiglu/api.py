"""The routed half of a mixture of experts: each token through the gated feed-forward of the experts chosen for it.

``sum_k weight_k (silu(x W_gate) * x W_up) W_down`` over the ``K`` experts of a token (DeepSeek-V2, arXiv 2405.04434,
section 2.2). Weights of all layers can be handed over whole, with the index of the layer: cut out for a kernel they
would be copied, 1.1 GB a layer for DeepSeek-V2-Lite.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.experts_swiglu import reference
from pallas_kernels.rotated_latent_attention.api import hopper_available

Implementation = Literal["xla", "mosaic_gpu"]


def experts_swiglu(
    x: Float[Array, "M D"],
    experts: Int[Array, "M K"],
    weights: Float[Array, "M K"],
    gate: Float[Array, "*L E D F"],
    up: Float[Array, "*L E D F"],
    down: Float[Array, "*L E F D"],
    *,
    layer: Int[Array, ""] | None = None,
    valid: Bool[Array, " M"] | None = None,
    shared: tuple[Float[Array, "*L D S"], Float[Array, "*L D S"], Float[Array, "*L S D"]] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "M D"]:
    """Sum of each token's experts, weighted in float32, and of the expert that all tokens pass, if there is one.

    Args:
      x: hidden states.
      experts, weights: what each token was routed to, and how much each of them counts. Choices of ``E`` and above are
        nobody's and add nothing: experts that another device has.
      gate, up, down: of one layer, or of all of them, of which those of ``layer`` are read.
      valid: tokens that are none (padding) cost nothing where the kernel runs; what comes out for them means nothing.
      shared: gate, up and down of the expert that all tokens pass.
      implementation: a named one runs or raises. None takes "mosaic_gpu" on a Hopper GPU for what it takes (bfloat16,
        widths as ``hopper.unsupported`` lists), and else XLA, which runs everywhere. Only XLA has a derivative.

    Raises:
      NotImplementedError: if the named implementation cannot run on this device or does not take these shapes.
    """
    if layer is None:
        gate, up, down, layer = gate[None], up[None], down[None], jnp.int32(0)
        shared = None if shared is None else (shared[0][None], shared[1][None], shared[2][None])
    if takes_kernel(x.dtype, gate, implementation):
        from pallas_kernels.experts_swiglu import hopper

        return hopper.experts_swiglu(x, experts, weights, gate, up, down, layer, valid=valid, shared=shared)
    routed = reference.experts_swiglu(x, experts, weights, gate, up, down, layer)
    if shared is None:
        return routed
    of_layer = (lax.dynamic_index_in_dim(matrix, layer, keepdims=False) for matrix in shared)
    return routed + reference.swiglu(x, *of_layer)


def takes_kernel(
    dtype: jax.typing.DTypeLike, gate: Array | jax.ShapeDtypeStruct, implementation: Implementation | None = None
) -> bool:
    """Whether the Hopper kernel will run for hidden states of ``dtype`` and such weights.

    Raises:
      NotImplementedError: if it was asked for by name and cannot.
    """
    if implementation == "xla":
        return False
    if not hopper_available():
        if implementation is not None:
            raise NotImplementedError(
                f"experts_swiglu: implementation={implementation!r} needs a Hopper GPU; use 'xla' or None"
            )
        return False
    from pallas_kernels.experts_swiglu import hopper

    reason = hopper.unsupported(dtype, gate)
    if reason is not None and implementation is not None:
        raise NotImplementedError(f"experts_swiglu: the Hopper kernel cannot take {reason}; use implementation='xla'")
    return reason is None


def swiglu_of_layer(
    x: Float[Array, "M D"],
    gate: Float[Array, "L D F"],
    up: Float[Array, "L D F"],
    down: Float[Array, "*L F D"],
    layer: Int[Array, ""],
    *,
    valid: Bool[Array, " M"],
) -> Float[Array, "M D"]:
    """The gated feed-forward of one layer among all, on a Hopper GPU (``hopper.swiglu``), which leaves out padding.

    ``down`` is of all layers, or, for fewer tokens than ``kernel_takes_down`` wants, of this one.
    """
    from pallas_kernels.experts_swiglu import hopper

    return hopper.swiglu(x, gate, up, down, layer, valid=valid)


def kernel_takes_down(tokens: int, width: int) -> bool:
    """Whether ``swiglu_of_layer`` reads ``down`` where it is; else it is best cut out by who loops over the layers."""
    from pallas_kernels.experts_swiglu import hopper

    return hopper.fills_gpu(tokens, width)
