"""The rows and attention weights of a model, taken where it hands them over, for studies that look at rows themselves.

A text is run once and its rows are kept; short blocks are then run behind the first ``n`` of them, many blocks at once,
without running the text again. Nothing is paged and nothing is approximated: rows stand where they were computed unless
a study moves them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from models.families import Model
from models.rotary import layer_table
from pallas_kernels.rotary import RotaryTable, rotate


@struct.dataclass
class Rows:
    """What ``N`` tokens leave in a cache, in every layer.

    Fields:
      latent: ``c_kv`` (MLA), or the values of all key heads.
      keys: rotary keys of ``J`` heads (one for MLA), turned to ``positions``.
      positions: of each token.
    """

    latent: Float[Array, "*batch L N C"]
    keys: Float[Array, "*batch L N J R"]
    positions: Int[Array, "*batch N"]


@struct.dataclass
class Recording:
    """One block of ``M`` tokens behind ``left``: final hidden states, its rows, and whom it attended to.

    ``mass [L, H, N + M]`` is the attention each row received, the rows of ``left`` first, as a mean over the queries of
    the block: over rows it sums to 1.
    """

    hidden: Float[Array, "*batch M D"]
    rows: Rows
    mass: Float[Array, "*batch L H K"]


@struct.dataclass
class RecordingView:
    """A KV view (``models/kv_view.py``) of one block behind known rows; it keeps what it is handed."""

    left: Rows
    own: Rows
    mass: Float[Array, "L H K"]

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        """MLA in its expanded form."""
        own_key = rotate(k_rope, self.own.positions, rotary)[:, None]
        query = jnp.concatenate([q_nope, q_rope], axis=-1)

        def expand(latent, key):
            nope = jnp.einsum("NC,HKC->NHK", latent, w_uk)
            key = jnp.broadcast_to(key, (*nope.shape[:2], key.shape[-1]))
            return jnp.concatenate([nope, key], axis=-1), jnp.einsum("NC,HCV->NHV", latent, w_uv)

        return self._attend(layer, query, expand, c_kv, own_key, scale)

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """Grouped-query attention."""
        own_key = rotate(key, self.own.positions, rotary)

        def expand(latent, key):
            return key, latent.reshape(len(latent), *value.shape[1:])

        return self._attend(layer, query, expand, value.reshape(len(value), -1), own_key, scale)

    def _attend(self, layer, query, expand, latent, key, scale):
        # Scores against the rows to the left and against the block stay apart: under vmap over blocks the rows to the
        # left are shared, and joining the keys would copy them once a block.
        left = (self.left.latent[layer], self.left.keys[layer], self.left.positions)
        parts = [(*expand(*left[:2]), left[2]), (*expand(latent, key), self.own.positions)]
        tokens, heads, _ = query.shape
        groups = parts[0][0].shape[1]
        query = query.reshape(tokens, groups, heads // groups, -1)
        scores = []
        for keys, _, positions in parts:
            score = jnp.einsum("MJQD,NJD->JQMN", query, keys, preferred_element_type=jnp.float32) * scale
            scores.append(jnp.where(self.own.positions[:, None] >= positions[None, :], score, -jnp.inf))
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        split = jnp.split(weights, [len(left[2])], axis=-1)
        out_left, out_own = (
            jnp.einsum("JQMN,NJV->MJQV", weight.astype(values.dtype), values)
            for weight, (_, values, _) in zip(split, parts, strict=True)
        )
        own = dataclasses.replace(
            self.own,
            latent=self.own.latent.at[layer].set(latent.astype(self.own.latent.dtype)),
            keys=self.own.keys.at[layer].set(key.astype(self.own.keys.dtype)),
        )
        mass = self.mass.at[layer].set(weights.mean(axis=2).reshape(heads, -1))
        out = (out_left + out_own).reshape(tokens, heads, -1)
        return out, dataclasses.replace(self, own=own, mass=mass)


def no_rows(model: Model, count: int = 0) -> Rows:
    """``count`` rows of zeros at positions 0, 1, ..."""
    form = model.row_format
    return Rows(
        latent=jnp.zeros((form.num_layers, count, form.latent_width), model.dtype),
        keys=jnp.zeros((form.num_layers, count, form.rope_heads, form.rope_width // form.rope_heads), model.dtype),
        positions=jnp.arange(count, dtype=jnp.int32),
    )


def record(model: Model, tokens: Int[Array, " M"], start: Int[Array, ""], left: Rows) -> Recording:
    """Runs ``tokens`` at ``start``, ``start + 1``, ... behind ``left``."""
    own = dataclasses.replace(no_rows(model, len(tokens)), positions=start + jnp.arange(len(tokens), dtype=jnp.int32))
    seen = len(left.positions) + len(tokens)
    mass = jnp.zeros((model.row_format.num_layers, model.config.num_attention_heads, seen), jnp.float32)
    hidden, view = model.forward(tokens, own.positions, RecordingView(left, own, mass))
    return Recording(hidden, view.own, view.mass)


@jax.jit
def run_text(model: Model, tokens: Int[Array, " N"], start: Int[Array, ""]) -> Rows:
    """Rows of a text that stands at ``start`` with nothing before it."""
    return record(model, tokens, start, no_rows(model)).rows


@partial(jax.jit, static_argnames="visible")
def run_blocks(model: Model, blocks: Int[Array, "B M"], start: Int[Array, ""], left: Rows, visible: int) -> Recording:
    """``B`` blocks, each at ``start`` behind the first ``visible`` rows of ``left`` and none of the others' rows."""
    seen = first(left, visible)
    return jax.vmap(lambda tokens: record(model, tokens, start, seen))(blocks)


def first(rows: Rows, count: int) -> Rows:
    """The first ``count`` rows: causality makes them those of the shorter text."""
    return Rows(rows.latent[:, :count], rows.keys[:, :count], rows.positions[:count])


def join(left: Rows, right: Rows) -> Rows:
    """Rows of both, in order."""
    return Rows(
        jnp.concatenate([left.latent, right.latent], axis=1),
        jnp.concatenate([left.keys, right.keys], axis=1),
        jnp.concatenate([left.positions, right.positions]),
    )


def move(rows: Rows, delta: int | Int[Array, "..."], rotary: RotaryTable) -> Rows:
    """The same rows ``delta`` positions further on, as the cache moves them: keys turned, the rest verbatim."""
    distance = jnp.broadcast_to(jnp.asarray(delta, jnp.int32), rows.positions.shape)
    return dataclasses.replace(rows, keys=turn(rows.keys, distance, rotary), positions=rows.positions + distance)


def turn(keys: Float[Array, "L N J R"], delta: Int[Array, " N"], rotary: RotaryTable) -> Float[Array, "L N J R"]:
    """``R(delta)`` on the keys of every layer, by the layer's own table."""
    layers = jnp.arange(keys.shape[0], dtype=jnp.int32)
    return jax.vmap(lambda layer, part: rotate(part, delta, layer_table(rotary, layer)))(layers, keys)
