"""The gated delta rule over a matrix memory, chunk by chunk: what Gated DeltaNet and Kimi Delta Attention share.

One head keeps a memory ``S [K, V]`` and does, for each token (arXiv 2412.06464, equation 10; 2510.26692, equation 1)

    S <- exp(g) S;    S <- S + k (beta (v - k S))^T;    o = q S

with a decay ``g <= 0`` per token (Gated DeltaNet) or per token and key channel (KDA). Within a chunk of ``Q`` tokens
nothing runs token by token: with ``G`` the running sum of ``g`` in the chunk and ``A[i, j] = beta_i sum_d k_i k_j
exp(G_i - G_j)`` below the diagonal, all corrections at once are ``(I + A)^-1 beta (V - (K exp(G)) S)`` (the UT
transform, arXiv 2406.06484, section 3), matrix products and one small triangular inverse. Only ``S`` goes from chunk to
chunk. Products take the model's dtype and accumulate in float32; decays, the inverse and ``S`` are float32.

Letters: ``B`` sequences, ``M`` tokens, ``N`` chunks, ``Q`` tokens a chunk, ``H`` heads, ``K`` and ``V`` widths of
keys and values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64
# Tokens whose decayed products are formed one by one in KDA, where no factor of the decay can leave the sum over
# channels without the risk of overflow.
SUB_CHUNK = 16
# Largest block that is inverted by its Neumann series: powers of A reach 20 there, against 1e17 for 64 equal keys.
NEUMANN = 8


@struct.dataclass
class Chunks:
    """A sequence cut into chunks, as ``carry`` reads it; the leading axis runs over chunks.

    ``reads`` are its keys and below them its queries, decayed from the chunk's begin, ``key_out`` its keys decayed to
    its end; ``solve`` is ``(I + A)^-1 beta``, ``scores`` the decayed ``q k`` on and below the diagonal, ``decay`` that
    of the whole chunk.
    """

    reads: Float[Array, "N B H QQ K"]
    key_out: Float[Array, "N B H Q K"]
    value: Float[Array, "N B H Q V"]
    solve: Float[Array, "N B H Q Q"]
    scores: Float[Array, "N B H Q Q"]
    decay: Float[Array, "N B H K"]


def gated_delta_rule(
    query: Float[Array, "B M J K"],
    key: Float[Array, "B M J K"],
    value: Float[Array, "B M H V"],
    log_decay: Float[Array, "B M H"] | Float[Array, "B M H K"],
    beta: Float[Array, "B M H"],
    memory: Float[Array, "B H K V"],
    valid: Bool[Array, " M"],
) -> tuple[Float[Array, "B M H V"], Float[Array, "B H K V"]]:
    """Output of every token and the memory behind the last valid one.

    Args:
      query: unit vectors times ``K ** -0.5``; key head ``j`` serves the value heads ``j H/J`` and following.
      key: unit vectors.
      log_decay: ``g``, float32, at most 0; with a channel axis it is KDA's.
      beta: strength of the write, float32.
      memory: float32, behind the tokens before these.
      valid: tokens that count, all ahead of those that do not; the others leave the memory as it is.
    """
    tokens, heads, dtype = query.shape[1], value.shape[2], value.dtype
    size = chunk_size(tokens)
    beta = jnp.where(valid[None, :, None], beta, 0.0)
    per_channel = log_decay.ndim == 4
    log_decay = jnp.where(valid[None, :, None, None] if per_channel else valid[None, :, None], log_decay, 0.0)
    total = jnp.cumsum(_chunked(log_decay, size), axis=3)
    query, key = _chunked(query, size), _chunked(key, size)
    beta = _chunked(beta, size)[..., None]
    if per_channel:
        query, key = _repeat_heads(query, heads), _repeat_heads(key, heads)
        key_scores, scores = _channel_decayed(key, query, total)
    else:
        key_scores, scores = _token_decayed(key, query, total)
        query, key, total = _repeat_heads(query, heads), _repeat_heads(key, heads), total[..., None]
    position = jnp.arange(size)
    below = position[:, None] > position[None, :]
    inverse = unit_lower_inverse(jnp.where(below, beta * key_scores, 0.0), _precision(dtype))
    chunks = Chunks(
        reads=jnp.concatenate([key * jnp.exp(total), query * jnp.exp(total)], axis=3).astype(dtype),
        key_out=(key * jnp.exp(total[..., -1:, :] - total)).astype(dtype),
        value=_chunked(value, size),
        solve=(inverse * jnp.swapaxes(beta, -1, -2)).astype(dtype),
        scores=jnp.where(position[:, None] >= position[None, :], scores, 0.0).astype(dtype),
        decay=jnp.broadcast_to(jnp.exp(total[..., -1, :]), (*key.shape[:3], key.shape[-1])),
    )
    out, memory = carry(chunks, memory)
    out = jnp.transpose(out, (1, 0, 3, 2, 4)).reshape(len(value), -1, heads, value.shape[-1])
    return out[:, :tokens], memory


def carry(chunks: Chunks, memory: Float[Array, "B H K V"]) -> tuple[Float[Array, "N B H Q V"], Float[Array, "B H K V"]]:
    """Takes the memory through the chunks, in order."""
    dtype, size = chunks.value.dtype, chunks.value.shape[3]
    precision = _precision(dtype)

    def step(memory: Array, chunk: Chunks) -> tuple[Array, Array]:
        read = _product("bhqk,bhkv->bhqv", chunk.reads, memory.astype(dtype), precision)
        surprise = (chunk.value.astype(jnp.float32) - read[:, :, :size]).astype(dtype)
        write = _product("bhqr,bhrv->bhqv", chunk.solve, surprise, precision).astype(dtype)
        out = read[:, :, size:] + _product("bhqr,bhrv->bhqv", chunk.scores, write, precision)
        memory = memory * chunk.decay[..., None] + _product("bhqk,bhqv->bhkv", chunk.key_out, write, precision)
        return memory, out.astype(dtype)

    memory, out = jax.lax.scan(step, memory, chunks, unroll=min(8, len(chunks.value)))
    return out, memory


def chunk_size(tokens: int) -> int:
    """Tokens a chunk: 64, or the power of two that holds fewer."""
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def unit_lower_inverse(
    lower: Float[Array, "*batch Q Q"], precision: Any = jax.lax.Precision.HIGHEST
) -> Float[Array, "*batch Q Q"]:
    """``(I + lower)^-1`` for strictly lower triangular ``lower``, ``Q`` a power of two.

    Diagonal blocks of 8 by their Neumann series, which ends after 8 terms; then twice the size at a time by
    ``[[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]]``. That is forward substitution in blocks, and as stable;
    the Neumann series of the whole matrix is not: for equal keys its terms grow like binomial coefficients and cancel.
    """
    size = lower.shape[-1]
    width = min(NEUMANN, size)
    blocks = _diagonal_blocks(lower, width, 0)
    inverse = jnp.broadcast_to(jnp.eye(width, dtype=lower.dtype), blocks.shape) - blocks
    power, order = blocks, 2
    while order < width:
        power = _small_product(power, power)
        inverse = inverse + _small_product(inverse, power)
        order *= 2
    while width < size:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = jnp.einsum("...ij,...jk->...ik", second, _diagonal_blocks(lower, width, 1), precision=precision)
        corner = -jnp.einsum("...ij,...jk->...ik", corner, first, precision=precision)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(matrix: Float[Array, "*batch Q Q"], width: int, below: int) -> Float[Array, "*batch P W W"]:
    """The blocks on the diagonal, or every other one of those just below it."""
    step = (1 + below) * width
    blocks = [
        matrix[..., begin + below * width : begin + (1 + below) * width, begin : begin + width]
        for begin in range(0, matrix.shape[-1], step)
    ]
    return jnp.stack(blocks, axis=-3)


def _small_product(a: Float[Array, "*batch W W"], b: Float[Array, "*batch W W"]) -> Float[Array, "*batch W W"]:
    """A product too small for matrix units: a fused sum, exact in float32."""
    return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)


def _token_decayed(
    key: Float[Array, "N B J Q K"], query: Float[Array, "N B J Q K"], total: Float[Array, "N B H Q"]
) -> tuple[Array, Array]:
    """``k_i k_j`` and ``q_i k_j``, decayed from ``j`` to ``i``; what lies above the diagonal means nothing."""
    heads, size = total.shape[2], key.shape[3]
    decay = jnp.exp(jnp.minimum(total[..., :, None] - total[..., None, :], 0.0))
    both = jnp.concatenate([key, query], axis=3)
    products = _repeat_heads(_product("nbhik,nbhjk->nbhij", both, key, _precision(key.dtype)), heads)
    return products[..., :size, :] * decay, products[..., size:, :] * decay


def _channel_decayed(key: Array, query: Array, total: Float[Array, "N B H Q K"]) -> tuple[Array, Array]:
    """The same with decays per channel, which cannot leave the sum: between sub-chunks the decay is split at the begin
    of the later one, so that both factors are at most 1, and within a sub-chunk it is formed pair by pair."""
    size, width = key.shape[3], key.shape[4]
    sub = min(SUB_CHUNK, size)
    parts = size // sub
    key_parts, query_parts, total_parts = (
        array.reshape(*array.shape[:3], parts, sub, width) for array in (key, query, total)
    )
    split = total_parts[..., :1, :]
    early = jnp.exp(total_parts - split)
    left = jnp.concatenate([key_parts * early, query_parts * early], axis=-2).astype(key.dtype)
    right = (key[:, :, :, None] * jnp.exp(jnp.minimum(split - total[:, :, :, None], 0.0))).astype(key.dtype)
    far = _product("nbhpik,nbhpjk->nbhpij", left, right, _precision(key.dtype))
    decay = jnp.exp(jnp.minimum(total_parts[..., :, None, :] - total_parts[..., None, :, :], 0.0))
    pairs = key_parts.astype(jnp.float32)[..., None, :, :] * decay
    part = jnp.arange(size) // sub

    def joined(own: Array, far: Array) -> Array:
        # Two sums over the same pairs: a compiler that fuses both forms each pair once.
        near = jnp.sum(own[..., None, :] * pairs, axis=-1)
        near = jnp.broadcast_to(near[..., None, :], (*near.shape[:-1], parts, sub)).reshape(*near.shape[:3], size, size)
        return jnp.where(part[:, None] == part[None, :], near, far.reshape(near.shape))

    return joined(key_parts, far[..., :sub, :]), joined(query_parts, far[..., sub:, :])


def _chunked(array: Array, size: int) -> Array:
    """``[B, M, H, ...]`` as ``[N, B, H, Q, ...]``, zeros behind the last token."""
    short = -array.shape[1] % size
    if short:
        array = jnp.pad(array, [(0, 0), (0, short)] + [(0, 0)] * (array.ndim - 2))
    array = array.reshape(array.shape[0], -1, size, *array.shape[2:])
    return jnp.transpose(array, (1, 0, 3, 2, *range(4, array.ndim)))


def _repeat_heads(array: Float[Array, "N B J Q K"], heads: int) -> Float[Array, "N B H Q K"]:
    """One of each key head for every value head it serves."""
    return array if array.shape[2] == heads else jnp.repeat(array, heads // array.shape[2], axis=2)


def _product(formula: str, a: Array, b: Array, precision: Any) -> Float[Array, "..."]:
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


def _precision(dtype: Any) -> Any:
    """Float32 models are references: their products are full float32 on every device."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def unit_vector(x: Float[Array, "*batch K"], epsilon: float = 1e-6) -> Float[Array, "*batch K"]:
    """``x / sqrt(|x|^2 + epsilon)``, float32 inside."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def valid_tokens(tokens: int, count: Int[Array, ""]) -> Bool[Array, " M"]:
    """The first ``count`` of ``tokens``."""
    return jnp.arange(tokens) < count
