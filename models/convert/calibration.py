"""What conversion needs to know of a model: second moments of queries, keys and values, and how far attention looks.

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
      phase: ``E[exp(i theta_f D)]`` over the distances ``D`` between a query and what it attends to, each weighted by
        ``A (1 - A)``, the slope of attention ``A`` in its score; key 0, where attention rests that looks for nothing,
        is left out.
    """

    tokens: int
    rows: Float[np.ndarray, "L Z Z"]
    queries: Float[np.ndarray, "L H K K"]
    phase: Complex[np.ndarray, "L H F"]


@struct.dataclass
class CalibrationView:
    """A stateless causal view (``models/kv_view.py``) that adds what it is handed to its sums."""

    positions: Int[Array, " M"]
    order: Int[Array, " K"]
    rows: Float[Array, "L Z Z"]
    queries: Float[Array, "L H K K"]
    phase: Float[Array, "L H F 2"]
    weight: Float[Array, "L H"]

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """Grouped attention, a block of queries at a time."""
        plain = rotate(query, -self.positions, rotary)[..., self.order]
        tokens = len(self.positions)
        z = jnp.concatenate([key[..., self.order].reshape(tokens, -1), value.reshape(tokens, -1)], axis=-1)
        out, phase, weight = self._attend(query, rotate(key, self.positions, rotary), value, rotary, scale)
        sums = {
            "rows": jnp.einsum("MY,MZ->YZ", z, z),
            "queries": jnp.einsum("MHJ,MHK->HJK", plain, plain),
            "phase": phase,
            "weight": weight,
        }
        return out, dataclasses.replace(
            self, **{name: getattr(self, name).at[layer].add(value) for name, value in sums.items()}
        )

    def _attend(self, query, key, value, rotary, scale):
        """Outputs, and sums over all pairs but those with key 0: slopes times cosine and sine of distance, slopes."""
        tokens, heads, width = query.shape
        groups = key.shape[1]
        cos, sin = cos_sin(rotary, self.positions)
        block = math.gcd(tokens, QUERY_BLOCK)

        def attend(start):
            part = jax.lax.dynamic_slice_in_dim(query, start, block).reshape(block, groups, heads // groups, width)
            scores = jnp.einsum("MJQK,NJK->JQMN", part, key) * scale
            here = jax.lax.dynamic_slice_in_dim(self.positions, start, block)
            weights = jax.nn.softmax(jnp.where(here[:, None] >= self.positions[None, :], scores, -jnp.inf), axis=-1)
            out = jnp.einsum("JQMN,NJK->MJQK", weights, value).reshape(block, heads, width)
            slope = (weights * (1 - weights)).at[..., 0].set(0).reshape(heads, block, tokens)
            by_cos, by_sin = (jnp.einsum("HMN,NF->MHF", slope, factor) for factor in (cos, sin))
            own_cos, own_sin = (jax.lax.dynamic_slice_in_dim(factor, start, block)[:, None] for factor in (cos, sin))
            # exp(i theta (m - n)) = exp(i theta m) conj(exp(i theta n))
            turned = jnp.stack([own_cos * by_cos + own_sin * by_sin, own_sin * by_cos - own_cos * by_sin], axis=-1)
            return out, turned.sum(axis=0), slope.sum(axis=(1, 2))

        out, phase, weight = jax.lax.map(attend, jnp.arange(0, tokens, block))
        return out.reshape(tokens, heads, width), phase.sum(axis=0), weight.sum(axis=0)


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
        found = [np.asarray(part, np.float64) for part in _sums(model, jnp.asarray(sequence), jnp.asarray(order))]
        sums = found if sums is None else [total + part for total, part in zip(sums, found, strict=True)]
        tokens += len(sequence)
        report(tokens)
    if sums is None:
        raise ValueError("sequences holds none of two tokens or more; calibrate on some text")
    rows, queries, phase, weight = sums
    looks = weight > 0  # a head that rests on key 0 alone has no distances; nothing of it needs rotation
    phase = np.where(looks[..., None], phase[..., 0] + 1j * phase[..., 1], 1) / np.where(looks, weight, 1)[..., None]
    return Statistics(tokens, rows / tokens, queries / tokens, phase)


@jax.jit
def _sums(model: Model, tokens: Int[Array, " T"], order: Int[Array, " K"]) -> tuple[Array, Array, Array, Array]:
    config = model.config
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    depth, heads, width = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    row = 2 * config.num_key_value_heads * width
    shapes = (depth, row, row), (depth, heads, width, width), (depth, heads, width // 2, 2), (depth, heads)
    view = CalibrationView(positions, order, *(jnp.zeros(shape, jnp.float32) for shape in shapes))
    _, view = model.forward(tokens.astype(jnp.int32), positions, view)
    return view.rows, view.queries, view.phase, view.weight


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
