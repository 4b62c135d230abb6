"""How far reused rows are from those of full prefill, for many prompts at once, and repair that goes by it.

Of all layers, only an oracle knows it: it takes the full prefill that reuse is to save. Repair of the tokens that
deviate most shows how much of what reuse loses such a choice could win back, and so how far a policy is from it. At the
second layer it is what CacheBlend goes by (``irminsul.deviation``, for one prompt).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.batch_serving import Asked, admitted, computed
from irminsul.blocks import Mode
from irminsul.cache import ContentCache
from irminsul.policies import Policy, get_policy
from irminsul.pool import LatentPool
from irminsul.shifted_rows import shifted_rows
from pallas_kernels.page_table import Storage
from pallas_kernels.rotary import rotate


def true_deviations(
    model: Any, caches: Sequence[ContentCache], asked: Sequence[Asked], policy: Policy, *, mode: Mode = "fast"
) -> list[Float[np.ndarray, " T"]]:
    """By prompt and token: how far the row that ``policy``, which repairs none, serves is from that of full prefill.

    Squared distance relative to the mean square of the layer's rows, latents and turned keys, summed over layers; 0 for
    tokens that are not served shifted.
    """
    return _deviations(model, model, caches, asked, policy, range(model.row_format.num_layers), mode)


def second_layer_deviations(
    model: Any, caches: Sequence[ContentCache], asked: Sequence[Asked], policy: Policy, *, mode: Mode = "fast"
) -> list[Float[np.ndarray, " T"]]:
    """``irminsul.deviation.second_layer_deviation`` of many prompts, by token."""
    first = model.first_layers(2)
    count = first.row_format.num_layers
    return _deviations(model, first, caches, asked, policy, range(count - 1, count), mode)


def _deviations(
    model: Any,
    first: Any,
    caches: Sequence[ContentCache],
    asked: Sequence[Asked],
    policy: Policy,
    layers: range,
    mode: Mode,
) -> list[Float[np.ndarray, " T"]]:
    """Deviation by prompt and token, summed over ``layers``; relative to a layer's rows where there are several.
    ``first`` is as much of the model as computes them."""
    full = admitted(model, caches, asked, get_policy("full"), mode=mode)
    plans = [each.request.plan for each in admitted(model, caches, asked, policy, mode=mode)]
    found = [np.zeros(plan.length, np.float32) for plan in plans]
    for group in computed(first, full, asked, dependence=False):
        for place, index in enumerate(group.indexes):
            cache, placement = caches[index], full[index].placement
            rows = shifted_rows(cache.tree, plans[index])
            if not len(rows):
                continue
            now_page = np.searchsorted(group.own[place], placement.write_page)  # of every token, in order
            slots = now_page[rows.position], placement.write_row[rows.position]
            places = np.zeros((6, cache.config.max_prompt_tokens), np.int32)
            places[:, : len(rows)] = [rows.position, rows.page, rows.row, rows.place, *slots]
            arguments = jax.device_put((places, np.int32(len(rows)), np.int32(place)))
            deviation = _deviation(first, cache.pool, group.pages, *arguments, np.array(layers), storage=group.storage)
            found[index][rows.position] = np.asarray(deviation)[: len(rows)]
    return found


def worst_tokens(deviation: Float[np.ndarray, " T"], fraction: float) -> Bool[np.ndarray, " T"]:
    """The ``fraction`` of the tokens served shifted that deviate most."""
    budget = int(fraction * np.count_nonzero(deviation))
    chosen = np.zeros(len(deviation), bool)
    chosen[np.argsort(-deviation, kind="stable")[:budget]] = True
    return chosen


@partial(jax.jit, static_argnames="storage")
def _deviation(
    model: Any,
    stored: LatentPool,
    full: LatentPool,
    places: Int[Array, "6 P"],
    count: Int[Array, ""],
    prompt: Int[Array, ""],
    layers: Int[Array, " K"],
    *,
    storage: Storage,
) -> Float[Array, " P"]:
    position, page, row, place, now_page, now_row = places
    real = jnp.arange(places.shape[1]) < count
    rows = model.row_format
    own = model.rotary.fine_cos.ndim == 3  # a table a layer

    def relative(here: Float[Array, "P W"], now: Float[Array, "P W"]) -> Float[Array, " P"]:
        size = jnp.sum(jnp.where(real[:, None], now**2, 0)) / count if len(layers) > 1 else 1.0
        return jnp.sum((here - now) ** 2, axis=-1) / size

    def add(total: Float[Array, " P"], layer: Int[Array, ""]) -> tuple[Float[Array, " P"], None]:
        latent, key = stored.latent_pages[layer, page, row], stored.rope_pages[layer, page, row]
        now_latent, now_key = (
            pages[prompt, layer, now_page, now_row] for pages in (full.latent_pages, full.rope_pages)
        )
        if storage == "base":
            rotary = jax.tree.map(lambda table: table[layer], model.rotary) if own else model.rotary
            heads = key[:, : rows.rope_width].reshape(len(key), rows.rope_heads, -1)
            key = rotate(heads, position - place, rotary).reshape(len(key), -1)
        return total + relative(latent, now_latent) + relative(key, now_key[:, : key.shape[1]]), None

    total, _ = jax.lax.scan(add, jnp.zeros(places.shape[1]), layers)
    return total
