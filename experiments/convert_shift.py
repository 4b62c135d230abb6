"""A cached context moved to another position through the page table, and what a question behind it then predicts.

The context is the same, so its rows differ from fresh ones by rotation alone: turned keys must give the predictions of
a full prefill, keys left as they are must not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from irminsul.pool import LatentPool, new_pool
from irminsul.view import PagedView
from models.families import Model
from pallas_kernels.page_table import PageTable


def shift_divergences(
    model: Model, contexts: list[np.ndarray], ends: list[np.ndarray], shift: int
) -> dict[str, float | int]:
    """Mean nats by which predictions at the tokens of ``ends`` differ from full prefill ``shift`` positions on.

    Returns:
      ``kl_rotated`` with the context's keys turned by ``shift``, ``kl_naive`` with them as they were computed.
    """
    room, tail = max(map(len, contexts)), max(map(len, ends))
    at, begin = jnp.int32(shift), jnp.int32(0)
    ways = {"fresh": (at, at, at), "rotated": (begin, at, begin), "naive": (begin, at, at)}
    sums = {"rotated": 0.0, "naive": 0.0}
    for context, end in zip(contexts, ends, strict=True):
        padded = [np.pad(part, (0, size - len(part))) for part, size in ((context, room), (end, tail))]
        tokens, question = (jnp.asarray(part, jnp.int32) for part in padded)
        logits = {
            name: np.asarray(_question_logits(model, tokens, question, jnp.int32(len(context)), *way), np.float64)
            for name, way in ways.items()
        }
        for name in sums:
            sums[name] += _divergence(logits["fresh"][: len(end)], logits[name][: len(end)])
    return {**{f"kl_{name}": total / len(contexts) for name, total in sums.items()}, "items": len(contexts)}


def _divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """In float64: differences of float32 logarithms are of the size of what is looked for."""

    def log_softmax(logits):
        logits = logits - logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    reference, other = log_softmax(reference), log_softmax(other)
    return float((np.exp(reference) * (reference - other)).sum(axis=-1).mean())


@jax.jit
def _question_logits(
    model: Model,
    context: Int[Array, " N"],
    question: Int[Array, " M"],
    count: Int[Array, ""],
    computed_at: Int[Array, ""],
    stands_at: Int[Array, ""],
    turned_from: Int[Array, ""],
) -> Float[Array, "M V"]:
    """Logits at a question behind the first ``count`` tokens of a context.

    The context was computed at ``computed_at``, stands at ``stands_at``, and its keys are turned by the distance from
    ``turned_from`` to there. All rows lie in one page; those of the question behind the context's room.
    """
    room = len(context)
    pool = new_pool(model.row_format, 1, room + len(question), model.dtype)

    def run(
        pool: LatentPool, tokens: Array, first_row: int, position: Array, table: PageTable
    ) -> tuple[Any, LatentPool]:
        rows = jnp.arange(len(tokens), dtype=jnp.int32)
        positions = position + rows
        offsets = jnp.array([0, len(tokens)], jnp.int32)
        view = PagedView(pool, table, positions, offsets, jnp.zeros_like(rows), first_row + rows, positions)
        hidden, view = model.forward(tokens, positions, view)
        return hidden, view.pool

    _, pool = run(pool, context, 0, computed_at, _table((0, 0, room, computed_at, computed_at)))
    begin = stands_at + count
    table = _table((0, 0, count, stands_at, turned_from), (0, room, room + len(question), begin, begin))
    hidden, _ = run(pool, question, room, begin, table)
    return model.unembed(hidden)


def _table(*entries: tuple[Any, ...]) -> PageTable:
    return PageTable(*(jnp.stack([jnp.int32(entry[field]) for entry in entries])[None] for field in range(5)))
