"""What conversion needs to know of a model: second moments of queries, keys and values, and of what meets in attention.

The original runs over text behind a KV view that keeps sums. So one pass serves every method and every rank, and
nothing grows with the amount of text.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Complex, Float, Int

from models.convert.pairs import interleaving
from models.families import Model
from pallas_kernels.rotary import cos_sin, rotate

QUERY_BLOCK = 256


@dataclass(frozen=True)
class Statistics:
    """Means over ``tokens`` tokens. Pairs of queries and keys are interleaved, whatever the model's layout.

    Fields:
      rows: ``E[z z^T]``, ``z`` the keys of all heads before rotation, then their values.
      queries: ``E[q q^T]`` of each head before rotation.
      seen: ``E[sum_k w |q_f|^2 k_f conj(k_f)^T]`` of each query head, ``k_f`` the pairs of all key heads at frequency
        ``f``. The sum is over the keys a query sees, each weighted by ``w = A |W_O (v - o)|^2``: attention ``A`` to it
        times what the layer's output moves by as attention goes from its mean ``o`` to this key's value ``v``. Key 0,
        where attention rests that looks for nothing, is left out.
      turned: the same with ``exp(i theta_f D)``, ``D`` the distance from query to key.
    """

    tokens: int
    rows: Float[np.ndarray, "L Z Z"]
    queries: Float[np.ndarray, "L H K K"]
    seen: Complex[np.ndarray, "L H F J J"]
    turned: Complex[np.ndarray, "L H F J J"]


@struct.dataclass
class CalibrationView:
    """A stateless causal view (``models/kv_view.py``) that adds what it is handed to its sums."""

    positions: Int[Array, " M"]
    order: Int[Array, " K"]
    gram: Float[Array, "L H K K"]  # of each head's output projection
    rows: Float[Array, "L Z Z"]
    queries: Float[Array, "L H K K"]
    seen: Complex[Array, "L H F J J"]
    turned: Complex[Array, "L H F J J"]

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """Grouped attention, a block of queries at a time."""
        plain = rotate(query, -self.positions, rotary)[..., self.order]
        own = key[..., self.order]
        tokens = len(self.positions)
        z = jnp.concatenate([own.reshape(tokens, -1), value.reshape(tokens, -1)], axis=-1)
        energy = jnp.square(plain[..., 0::2]) + jnp.square(plain[..., 1::2])
        rotated = rotate(key, self.positions, rotary)
        out, met = self._attend(query, rotated, value, energy, self.gram[layer], rotary, scale)
        seen, turned = _moments(met, own[..., 0::2] + 1j * own[..., 1::2], *cos_sin(rotary, self.positions))
        sums = {
            "rows": jnp.einsum("MY,MZ->YZ", z, z),
            "queries": jnp.einsum("MHJ,MHK->HJK", plain, plain),
            "seen": seen,
            "turned": turned,
        }
        return out, dataclasses.replace(
            self, **{name: getattr(self, name).at[layer].add(value) for name, value in sums.items()}
        )

    def _attend(self, query, key, value, energy, gram, rotary, scale):
        """Outputs, and for each key and head the sums over queries of weight times energy, alone and times cosine and
        sine of the query's position; key 0 has none."""
        tokens, heads, width = query.shape
        groups = key.shape[1]
        cos, sin = (factor[:, None] for factor in cos_sin(rotary, self.positions))
        asked = jnp.concatenate([energy, energy * cos, energy * sin], axis=-1)
        values = jnp.repeat(value, heads // groups, axis=1)
        lengths = jnp.einsum("NHJ,HJK,NHK->HN", values, gram, values)
        block = math.gcd(tokens, QUERY_BLOCK)

        def attend(met, start):
            part = jax.lax.dynamic_slice_in_dim(query, start, block).reshape(block, groups, heads // groups, width)
            scores = jnp.einsum("MJQK,NJK->JQMN", part, key) * scale
            here = jax.lax.dynamic_slice_in_dim(self.positions, start, block)
            weights = jax.nn.softmax(jnp.where(here[:, None] >= self.positions[None, :], scores, -jnp.inf), axis=-1)
            out = jnp.einsum("JQMN,NJK->MJQK", weights, value).reshape(block, heads, width)
            mapped = jnp.einsum("MHJ,HJK->MHK", out, gram)
            distance = lengths[:, None] + jnp.einsum("MHK,MHK->HM", mapped, out)[..., None]
            distance = jnp.maximum(distance - 2 * jnp.einsum("MHK,NHK->HMN", mapped, values), 0)
            weight = weights.reshape(heads, block, tokens).at[..., 0].set(0) * distance
            return met + jnp.einsum("HMN,MHF->HNF", weight, jax.lax.dynamic_slice_in_dim(asked, start, block)), out

        met = jnp.zeros((heads, tokens, asked.shape[-1]), jnp.float32)
        met, out = jax.lax.scan(attend, met, jnp.arange(0, tokens, block))
        return out.reshape(tokens, heads, width), met


def _moments(
    met: Float[Array, "H N F3"], key: Complex[Array, "N J F"], cos: Float[Array, "N F"], sin: Float[Array, "N F"]
) -> tuple[Complex[Array, "H F J J"], Complex[Array, "H F J J"]]:
    """``seen`` and ``turned`` of a layer; a head at a time, since products of keys with themselves are large."""

    def moments(met):
        plain, by_cos, by_sin = jnp.split(met, 3, axis=-1)
        # exp(i theta (m - n)) = exp(i theta m) conj(exp(i theta n))
        turned = (by_cos + 1j * by_sin) * (cos - 1j * sin)
        return tuple(jnp.einsum("NJF,NIF->FJI", key * weight[:, None], key.conj()) for weight in (plain, turned))

    return jax.lax.map(moments, met)


def calibrate(
    model: Model, sequences: Iterable[np.ndarray], report: Callable[[int], None] = lambda tokens: None
) -> Statistics:
    """Runs the original over sequences of token ids and takes means. Sums are kept in float64 on the host.

    Args:
      model: of the family ``gqa``; float32 weights give what the prototype's figures were measured with.
      sequences: int ``[T]`` each; one program is compiled for each length, a multiple of 256 is fastest. Distances up
        to ``T - 1`` are seen: conversion for a context of ``T`` tokens wants sequences as long.
      report: called with the number of tokens done after each sequence.

    Raises:
      ValueError: for a model that is no grouped attention, or if there is no sequence of at least two tokens.
    """
    if model.row_format.kind != "grouped":
        raise ValueError(
            f"model_type={model.config.model_type!r} has no grouped attention to convert; give a GQA model"
        )
    order = interleaving(model.config.head_dim, model.row_format.interleaved)
    tokens, sums = 0, None
    for sequence in sequences:
        if len(sequence) < 2:
            continue
        parts = map(np.asarray, _sums(model, jnp.asarray(sequence), jnp.asarray(order)))
        found = [part.astype(np.result_type(part, np.float64)) for part in parts]
        sums = found if sums is None else [total + part for total, part in zip(sums, found, strict=True)]
        tokens += len(sequence)
        report(tokens)
    if sums is None:
        raise ValueError("sequences holds none of two tokens or more; calibrate on some text")
    return Statistics(tokens, *(part / tokens for part in sums))


@jax.jit
def _sums(model: Model, tokens: Int[Array, " T"], order: Int[Array, " K"]) -> tuple[Array, Array, Array, Array]:
    config = model.config
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    depth, heads, groups = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    width = config.head_dim
    row = 2 * groups * width
    real = [jnp.zeros(shape, jnp.float32) for shape in ((depth, row, row), (depth, heads, width, width))]
    both = [jnp.zeros((depth, heads, width // 2, groups, groups), jnp.complex64) for _ in range(2)]
    out = model.params["layers"]["attention"]["out"].reshape(depth, heads, width, -1)
    view = CalibrationView(positions, order, jnp.einsum("LHJD,LHKD->LHJK", out, out), *real, *both)
    _, view = model.forward(tokens.astype(jnp.int32), positions, view)
    return view.rows, view.queries, view.seen, view.turned


def token_blocks(
    documents: Iterable[str], encode: Callable[[str], np.ndarray], length: int, separator: int | None, count: int
) -> Iterator[np.ndarray]:
    """The first ``count`` stretches of ``length`` tokens of documents joined by ``separator``; reads no further."""
    kept: list[np.ndarray] = []
    filled = 0
    for text in documents:
        ids = np.asarray(encode(text), np.int32)
        kept.append(ids if separator is None else np.concatenate([[np.int32(separator)], ids]))
        filled += len(kept[-1])
        if filled < length:
            continue
        stream = np.concatenate(kept)
        for start in range(0, len(stream) - length + 1, length):
            yield stream[start : start + length]
            count -= 1
            if count == 0:
                return
        kept = [stream[len(stream) // length * length :]]
        filled = len(kept[0])
