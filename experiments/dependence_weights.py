"""How much each layer's attention says of how wrong a row will be behind another context: fitted on plain text.

A row's dependence is a weighted mean over layers of the largest share that a head gives to what lies outside the span
(``irminsul/dependence.py``). Which layers carry meaning from afar, and which look back whatever the token says, differs
from model to model. Here stretches of text are read behind one context and again behind another. Of every token that
gives the shares of the first reading, and how far its rows are from those of the second. The weights are the
non-negative least-squares fit of that distance by the shares. No task is looked at, and no answer.
"""

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Int32
from scipy.optimize import nnls

from experiments.errors import InputError
from experiments.subjects import Subject, documents
from models import pretrained
from models.kv_view import DenseView
from pallas_kernels.rotary import rotate

FILE = "dependence_weights.json"  # in the folder of a reference model
TEXTS = ("library", "heldout")  # sources of Python's standard library, technical documentation
MOST_TOKENS = 300_000  # of a text
LENGTH = 1024  # tokens of a reading, context included
EDGES = (96, 192, 384, 640)  # tokens of context


@struct.dataclass
class ReadingView(DenseView):
    """Dense attention that keeps of every layer the rows, keys not turned, and the largest share of a head's weight
    that lies on positions from 1 up to ``edge``, position 0 (an attention sink) aside."""

    edge: Int[Array, ""] | None = None
    rows: tuple[Float[Array, "L M W"], Float[Array, "L M R"]] | None = None
    outside: Float[Array, "L M"] | None = None

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        """See ``KVView``."""
        out, _ = super().attend_latent(layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale)
        key = jnp.einsum("NC,HKC->NHK", c_kv, w_uk)
        turned = jnp.broadcast_to(rotate(k_rope, self.positions, rotary)[:, None], (*key.shape[:2], k_rope.shape[-1]))
        query = jnp.concatenate([q_nope, q_rope], axis=-1)
        scores = jnp.einsum("MHD,NHD->HMN", query, jnp.concatenate([key, turned], axis=-1)) * scale
        return out, self._kept(layer, scores, c_kv, k_rope)

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """See ``KVView``."""
        out, _ = super().attend_grouped(layer, query, key, value, rotary, scale)
        turned = jnp.repeat(rotate(key, self.positions, rotary), query.shape[1] // key.shape[1], axis=1)
        scores = jnp.einsum("MHD,NHD->HMN", query, turned) * scale
        return out, self._kept(layer, scores, value.reshape(len(value), -1), key.reshape(len(key), -1))

    def _kept(self, layer, scores, latent, key):
        visible = self.positions[:, None] >= self.positions[None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        far = (self.positions > 0) & (self.positions < self.edge)
        outside = jnp.max(jnp.sum(jnp.where(far, weights, 0), axis=-1), axis=0)
        assert self.rows is not None
        assert self.outside is not None
        rows = (self.rows[0].at[layer].set(latent), self.rows[1].at[layer].set(key))
        return dataclasses.replace(self, rows=rows, outside=self.outside.at[layer].set(outside))


@jax.jit
def _read(model: Any, tokens: Int[Array, " M"], edge: Int[Array, ""]) -> ReadingView:
    positions, row = jnp.arange(len(tokens)), model.row_format
    key_width = row.rope_width if row.kind == "latent" else row.latent_width
    empty = partial(jnp.zeros, dtype=jnp.float32)
    shape = row.num_layers, len(tokens)
    rows = empty((*shape, row.latent_width)), empty((*shape, key_width))
    _, view = model.forward(tokens, positions, ReadingView(positions, edge=edge, rows=rows, outside=empty(shape)))
    return view


@jax.jit
def _distance(one: ReadingView, other: ReadingView) -> Float[Array, " M"]:
    """Relative to the size of the layer's rows, over all layers: ``oracle_repair`` ranks by its square."""
    assert one.rows is not None
    assert other.rows is not None
    square = 0.0
    for here, there in zip(one.rows, other.rows, strict=True):
        size = jnp.mean(jnp.sum(there**2, axis=-1), axis=-1, keepdims=True)
        square += jnp.sum(jnp.sum((here - there) ** 2, axis=-1) / size, axis=0)
    return jnp.sqrt(square)


def readings(
    model: Any, stream: Int32[np.ndarray, " N"], bos: int | None, count: int, seed: int = 0
) -> tuple[Float[np.ndarray, "n L"], Float[np.ndarray, " n"]]:
    """Of the tokens of ``count`` stretches of ``stream``, each read behind two contexts of one length: the shares by
    layer, and how far the rows moved.

    Raises:
      InputError: if the stream is too short to draw from.
    """
    if len(stream) < 4 * LENGTH:
        raise InputError(f"text has {len(stream)} tokens, fewer than the {4 * LENGTH} that stretches are drawn from")
    rng, first = np.random.default_rng(seed), [] if bos is None else [bos]
    shares, distances = [], []
    for index in range(count):
        edge = EDGES[index % len(EDGES)]
        body, *contexts = (
            stream[at : at + size]
            for at, size in zip(
                rng.integers(len(stream) - LENGTH, size=3), (LENGTH - edge, *[edge - len(first)] * 2), strict=True
            )
        )
        views = [
            _read(model, jnp.asarray(np.concatenate([first, context, body]).astype(np.int32)), jnp.int32(edge))
            for context in contexts
        ]
        shares.append(np.asarray(views[0].outside)[:, edge:].T)
        distances.append(np.asarray(_distance(*views))[edge:])
    return np.concatenate(shares), np.concatenate(distances)


def fitted_weights(shares: Float[np.ndarray, "n L"], distances: Float[np.ndarray, " n"]) -> tuple[float, ...]:
    """Weights of the layers, of sum 1 and none negative, that follow the distances best; a constant is fitted beside
    them, which is what tokens differ by whatever they look at."""
    terms = np.concatenate([shares, np.ones((len(shares), 1))], axis=1)
    weights = nnls(terms, distances)[0][:-1]
    if weights.sum() <= 1e-6 * np.abs(distances).max():  # shares tell nothing; what is left is rounding
        return (1 / shares.shape[1],) * shares.shape[1]
    return tuple(np.round(weights / weights.sum(), 4).tolist())


def layer_weights(chosen: Subject, count: int) -> tuple[float, ...]:
    """``CacheConfig.dependence_weights`` of a model: those kept with it, else fitted on ``count`` stretches of each of
    ``TEXTS``; for no stretches, none.

    Raises:
      InputError: as ``readings``.
    """
    if not count:
        return ()
    kept = pretrained.FOLDER / chosen.name / FILE
    return tuple(json.loads(kept.read_text())["weights"]) if kept.is_file() else fit(chosen, count)


def fit(chosen: Subject, count: int) -> tuple[float, ...]:
    """Weights fitted on ``count`` stretches of each of ``TEXTS``.

    Raises:
      InputError: as ``readings``.
    """
    with jax.default_matmul_precision("highest"):
        found = [
            readings(chosen.model, stream(chosen, text), chosen.bos, count, seed) for seed, text in enumerate(TEXTS)
        ]
    shares, distances = (np.concatenate(part) for part in zip(*found, strict=True))
    return fitted_weights(shares, distances)


def stream(chosen: Subject, text: str) -> Int32[np.ndarray, " N"]:
    """Tokens of a text, as many as are drawn from."""
    parts, total = [], 0
    for document in documents(text)[0]:
        parts.append(chosen.encode(document).astype(np.int32))
        total += len(parts[-1])
        if total > MOST_TOKENS:
            break
    return np.concatenate(parts)
