"""Greedy continuations of many prompts at once behind one shared beginning, on any device.

Rows lie in one buffer a prompt: those of the shared beginning, computed once, then the prompt's own, then one a
generated token. No paging and no reuse beyond the beginning: this is what reuse is compared with.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from models.families import Model
from pallas_kernels.rotary import rotate

NEVER = 2**30  # the position of a row that nobody may see


@struct.dataclass
class BufferView:
    """A KV view (``models/kv_view.py``) of ``M`` tokens at ``positions``, written from ``start`` on into ``N`` slots.

    MLA attends in its absorbed form: rows are read as they are kept.
    """

    latent: Float[Array, "L N C"]
    keys: Float[Array, "L N J R"]
    slot_positions: Int[Array, " N"]
    positions: Int[Array, " M"]
    start: Int[Array, ""]

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        """Multi-head latent attention over the buffer."""
        view = self._write(layer, c_kv, rotate(k_rope, self.positions, rotary)[:, None])
        latent, key = view.latent[layer], view.keys[layer][:, 0]
        scores = jnp.einsum("MHC,NC->HMN", jnp.einsum("MHK,HKC->MHC", q_nope, w_uk), latent)
        weights = self._weights((scores + jnp.einsum("MHR,NR->HMN", q_rope, key)) * scale)
        return jnp.einsum("MHC,HCV->MHV", jnp.einsum("HMN,NC->MHC", weights.astype(latent.dtype), latent), w_uv), view

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        """Grouped-query attention over the buffer."""
        view = self._write(layer, value.reshape(len(value), -1), rotate(key, self.positions, rotary))
        keys = view.keys[layer]
        values = view.latent[layer].reshape(keys.shape)
        query = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
        weights = self._weights(jnp.einsum("MJQK,NJK->JQMN", query, keys) * scale)
        out = jnp.einsum("JQMN,NJK->MJQK", weights.astype(values.dtype), values)
        return out.reshape(len(query), -1, values.shape[-1]), view

    def _write(self, layer, latent, keys):
        def put(buffer, rows):
            start = (layer, self.start, *(0,) * (buffer.ndim - 2))
            return jax.lax.dynamic_update_slice(buffer, rows[None].astype(buffer.dtype), start)

        return dataclasses.replace(self, latent=put(self.latent, latent), keys=put(self.keys, keys))

    def _weights(self, scores):
        visible = self.slot_positions[None, :] <= self.positions[:, None]
        return jax.nn.softmax(jnp.where(visible, scores.astype(jnp.float32), -jnp.inf), axis=-1)


def empty_view(model: Model, slots: int) -> BufferView:
    """Room for ``slots`` rows."""
    row = model.row_format
    return BufferView(
        jnp.zeros((row.num_layers, slots, row.latent_width), model.dtype),
        jnp.zeros((row.num_layers, slots, row.rope_heads, row.rope_width // row.rope_heads), model.dtype),
        jnp.full(slots, NEVER, jnp.int32),
        jnp.zeros(0, jnp.int32),
        jnp.int32(0),
    )


def run_block(
    model: Model, view: BufferView, tokens: Int[Array, " M"], positions: Int[Array, " M"], start: Any, count: Any
) -> tuple[Float[Array, "M D"], BufferView]:
    """Runs tokens into slots from ``start`` on; those behind the first ``count`` are padding that nobody sees."""
    shown = jnp.where(jnp.arange(len(tokens)) < count, positions, NEVER)
    slots = jax.lax.dynamic_update_slice(view.slot_positions, shown.astype(jnp.int32), (start,))
    here = dataclasses.replace(view, slot_positions=slots, positions=positions, start=jnp.int32(start))
    hidden, after = model.forward(tokens, positions, here)
    # The block's own fields go back to what they were, so that a loop carries the same shapes.
    return hidden, dataclasses.replace(after, positions=view.positions, start=view.start)


@partial(jax.jit, static_argnames="steps")
def _continue(
    model: Model, beginning: Int[Array, " P"], prompts: Int[Array, "B T"], lengths: Int[Array, " B"], *, steps: int
) -> Int[Array, "B n"]:
    first, room = len(beginning), prompts.shape[1]
    view = empty_view(model, first + room + steps)
    _, view = run_block(model, view, beginning, jnp.arange(first, dtype=jnp.int32), 0, first)

    def one(prompt, length):
        positions = first + jnp.arange(room, dtype=jnp.int32)
        hidden, own = run_block(model, view, prompt, positions, first, length)

        def draw(hidden):
            return jnp.argmax(model.unembed(hidden)).astype(jnp.int32)

        def step(carry, index):
            token, own = carry
            position = (first + length + index)[None]
            hidden, own = run_block(model, own, token[None], position, first + room + index, 1)
            return (draw(hidden[0]), own), token

        carry = (draw(hidden[length - 1]), own)
        return jax.lax.scan(step, carry, jnp.arange(steps, dtype=jnp.int32))[1]

    return jax.vmap(one)(prompts, lengths)


def continuations(
    model: Model, beginning: np.ndarray, prompts: list[np.ndarray], *, steps: int, room: int, batch: int
) -> list[np.ndarray]:
    """``steps`` greedy tokens behind each of ``prompts``, which follow ``beginning``.

    Args:
      room: tokens of the longest prompt, padded to; one program is compiled for each value.
      batch: prompts run at once.

    Raises:
      ValueError: if a prompt is longer than ``room``.
    """
    longest = max(len(prompt) for prompt in prompts)
    if longest > room:
        raise ValueError(f"room={room} is less than the {longest} tokens of the longest prompt; raise it")
    found: list[np.ndarray] = []
    for at in range(0, len(prompts), batch):
        part = prompts[at : at + batch]
        padded = np.zeros((batch, room), np.int32)
        lengths = np.ones(batch, np.int32)
        for row, prompt in enumerate(part):
            padded[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        tokens = _continue(model, jnp.asarray(beginning, jnp.int32), padded, lengths, steps=steps)
        found += list(np.asarray(tokens)[: len(part)])
    return found
