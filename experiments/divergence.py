"""How far one next-token distribution is from another."""

from typing import Any

from jaxtyping import Float


def log_softmax(logits: Float[Any, "*n V"]) -> Float[Any, "*n V"]:
    """Logarithms of probabilities, in the precision and on the device of ``logits``."""
    namespace = logits.__array_namespace__()
    shifted = logits - namespace.max(logits, axis=-1, keepdims=True)
    return shifted - namespace.log(namespace.sum(namespace.exp(shifted), axis=-1, keepdims=True))


def divergence(reference: Float[Any, "*n V"], other: Float[Any, "*n V"]) -> Float[Any, "*n"]:
    """KL(reference || other) of each token, in nats; rounding below 0 is cut off. NumPy or JAX arrays of logits."""
    namespace = reference.__array_namespace__()
    log_p, log_q = log_softmax(reference), log_softmax(other)
    return namespace.maximum(namespace.sum(namespace.exp(log_p) * (log_p - log_q), axis=-1), 0)
