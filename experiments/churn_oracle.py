"""What a prompt's rows and logits must be, computed again in two ways that share nothing with the cache's books.

``Reference`` runs the same program from an empty cache: pure rows must equal it bit for bit. ``recompute`` is the model
in numpy and float64 over the rows that a request was served: what stands behind shifted rows must be what those rows
give, within the rounding of float32.
"""

from collections import OrderedDict
from typing import Any

import numpy as np

from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.pool import LatentPool
from irminsul.prefill import Request, complete, prefill


def pool_rows(pool: LatentPool | None) -> np.ndarray:
    """Every row of a pool, ``[N, G, L * (C + R)]``: a copy."""
    if pool is None:
        raise ValueError("cache holds no pool (plan only), so there are no rows to compare")
    parts = (np.asarray(pool.latent_pages), np.asarray(pool.rope_pages))
    layers, pages, page_size, _ = parts[0].shape
    together = np.concatenate(parts, axis=-1)
    return together.transpose(1, 2, 0, 3).reshape(pages, page_size, layers * together.shape[-1]).copy()


def same_bits(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``bool [n]``: which rows of two ``[n, W]`` float32 arrays hold the same bits."""
    return (left.view(np.uint32) == right.view(np.uint32)).all(axis=-1)


class Reference:
    """Rows and logits of a prompt without any cache, by weights and tokens; the latest ``capacity`` are kept."""

    def __init__(self, config: CacheConfig, capacity: int = 256):
        self.config, self.capacity = config, capacity
        self._cache: ContentCache | None = None
        self._known: OrderedDict[tuple[str, bytes], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __call__(self, model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(rows [T, W], logits [V])`` of a cold prefill."""
        key = (model.digest, tokens.tobytes())
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        cache = self._cache or new_cache(self.config, model.row_format)
        result = prefill(model, cache, tokens, "full", mode="deterministic")
        request = result.request
        page, row, _ = places(request)
        found = pool_rows(result.cache.pool)[page, row], np.asarray(result.logits)
        self._cache = complete(result.cache, request)
        self._known[key] = found
        if len(self._known) > self.capacity:
            self._known.popitem(last=False)
        return found


def places(request: Request) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Page, row and base position of each prompt token, from the page table that attention went through."""
    page, begin, end, target, base = request.entries.T.astype(np.int64)
    count = end - begin
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    position = np.repeat(target, count) + within
    order = np.argsort(position, kind="stable")
    if not np.array_equal(position[order], np.arange(request.plan.length)):
        raise AssertionError(f"the page table covers {position.tolist()}, not each of {request.plan.length} positions")
    return (
        np.repeat(page, count)[order],
        (np.repeat(begin, count) + within)[order],
        (np.repeat(base, count) + within)[order],
    )


def recompute(
    config: Any,
    params: Any,
    storage: str,
    tokens: np.ndarray,
    rows: np.ndarray,
    base: np.ndarray,
    reused: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) in numpy, float64, one sequence.

    Args:
      config, params: of a model of dense layers with tied embeddings; ``params`` from ``float64_params``.
      storage: of the cache the rows come from.
      rows: ``[T, W]``, of which those marked in ``reused`` are given and the others computed.
      base: position each key is, or has to be, stored for.

    Returns:
      ``(rows [T, W], logits [T, V])``; of reused tokens the given row, and logits that mean nothing.
    """
    layers, latent, rope = config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim
    nope, positions, fresh = config.qk_nope_head_dim, np.arange(len(tokens)), ~reused
    given = rows.reshape(len(tokens), layers, latent + rope).astype(np.float64)
    out = given.copy()
    hidden = params["embed"][tokens[fresh]]
    visible = positions[None, :] <= positions[fresh][:, None]
    theta = config.rope_parameters.rope_theta
    turn = positions - base if storage == "base" else positions
    for layer in range(layers):
        weights = _layer(params["dense"], layer)
        attention = weights["attention"]
        x = _norm(hidden, config.rms_norm_eps) * weights["input_norm"]
        query = np.einsum("md,dhk->mhk", x, attention["q"])
        down = x @ attention["kv_down"]
        c_kv, key = given[:, layer, :latent].copy(), _rotate(given[:, layer, latent:], turn, theta)
        c_kv[fresh] = _norm(down[:, :latent], 1e-6) * attention["kv_norm"]
        key[fresh] = _rotate(down[:, latent:], positions[fresh], theta)
        out[fresh, layer, :latent] = c_kv[fresh]
        stored = _rotate(down[:, latent:], base[fresh], theta) if storage == "base" else down[:, latent:]
        out[fresh, layer, latent:] = stored
        q_latent = np.einsum("mhk,hkc->mhc", query[..., :nope], attention["w_uk"])
        q_rope = _rotate(query[..., nope:], positions[fresh][:, None], theta)
        scores = (q_latent @ c_kv.T + q_rope @ key.T) * (nope + rope) ** -0.5  # [M, H, T]
        scores[np.broadcast_to(~visible[:, None], scores.shape)] = -np.inf
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        value = np.einsum("mhc,hcv->mhv", weight @ c_kv, attention["w_uv"])
        hidden = hidden + np.einsum("mhv,hvd->md", value, attention["out"])
        x = _norm(hidden, config.rms_norm_eps) * weights["post_norm"]
        gate = x @ weights["mlp"]["gate"]
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ weights["mlp"]["up"])) @ weights["mlp"]["down"]
    logits = np.zeros((len(tokens), config.vocab_size))
    logits[fresh] = _norm(hidden, config.rms_norm_eps) * params["norm"] @ params["embed"].T
    return out.reshape(rows.shape), logits


def float64_params(params: Any) -> Any:
    """A model's parameters as numpy float64, in the same tree."""
    if isinstance(params, dict):
        return {name: float64_params(value) for name, value in params.items()}
    return np.asarray(params, np.float64)


def _layer(stacked: dict[str, Any], layer: int) -> dict[str, Any]:
    return {name: _layer(value, layer) if isinstance(value, dict) else value[layer] for name, value in stacked.items()}


def _norm(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon)


def _rotate(x: np.ndarray, position: np.ndarray, theta: float) -> np.ndarray:
    """Turns interleaved pairs by ``position``, which may be negative."""
    width = x.shape[-1]
    angle = position[..., None] * theta ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.empty(np.broadcast_shapes(x.shape, (*angle.shape[:-1], width)))
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out
