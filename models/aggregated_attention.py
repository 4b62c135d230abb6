"""DeepSeek-V4's aggregated attention: far tokens are seen through entries that sum up ``stride`` of them.

A small functional model for studies of reuse (``experiments.aggregated_attention``), not a family: the cache refuses
``deepseek_v4`` by name. The attention is that of the published code, checked against ``transformers``
(``modeling_deepseek_v4``: compressed sparse attention, paper section 2.3.1, and heavily compressed attention, 2.3.2);
around it stand plain norms and a SwiGLU, without hyper-connections and experts.

A token gives ``content`` and ``gate``. The entry of a window is ``norm(sum_j softmax_j(gate_j + bias_j) content_j)``,
channel by channel, rotated by the window's first position: ``heavy`` layers sum ``stride`` tokens. ``sparse`` layers
keep two series a token, sum the second of the window's tokens and the first of the window before, and attend to the
``index_topk`` entries that an indexer, aggregated likewise, ranks highest. The nearest ``sliding_window`` tokens are
seen as they are. Key and value are one row; its rotated part is turned back in the output.

Letters: ``T`` tokens, ``W`` windows, ``D`` head width, ``R`` its rotated part (the last values), ``H`` heads, ``S``
stride, ``Z`` hidden size, ``J`` series (1 or 2), ``I`` width of an indexer key.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.layers import embedding, rms_norm, swiglu
from models.layers import unembed as logits_of
from pallas_kernels.rotary import RotaryTable, rotary_table, rotate

Kind = Literal["heavy", "sparse"]


@dataclass(frozen=True)
class AggregatedConfig:
    """Sizes under the names of a ``config.json``; ``kinds`` and ``strides`` are those of the layers in turn."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    kinds: tuple[Kind, ...]
    strides: tuple[int, ...]
    rope_theta: float = 160000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096


class Parts(NamedTuple):
    """What a layer makes of its tokens, before any rotation; the last two only in ``sparse`` layers.

    ``row`` is what the sliding window sees; ``content`` and ``gate`` are what entries are made of.
    """

    row: Float[Array, "T D"]
    content: Float[Array, "T JD"]
    gate: Float[Array, "T JD"]
    index_content: Float[Array, "T JI"] | None = None
    index_gate: Float[Array, "T JI"] | None = None


class Kept(NamedTuple):
    """What a layer attends to: rows of tokens, entries of windows, and their indexer keys, before rotation."""

    row: Float[Array, "T D"]
    entry: Float[Array, "W D"]
    index_key: Float[Array, "W I"] | None = None


def rotation(config: AggregatedConfig) -> RotaryTable:
    """One table for queries, rows and entries."""
    width = config.qk_rope_head_dim
    frequencies = config.rope_theta ** -(np.arange(0, width, 2) / width)
    return rotary_table(frequencies, interleaved=True, max_delta=config.max_position_embeddings)


def rotate_trailing(x: Float[Array, "T *heads D"], positions: Int[Array, " T"], table: RotaryTable) -> Array:
    """Turns the last ``R`` values."""
    width = table.width
    return jnp.concatenate([x[..., :-width], rotate(x[..., -width:], positions, table)], axis=-1)


def token_parts(params: dict[str, Any], x: Float[Array, "T Z"], epsilon: float) -> Parts:
    """Rows, contents and gates of tokens: functions of each token's hidden state alone."""
    row = rms_norm(x @ params["row"], params["row_norm"], epsilon)
    parts = Parts(row, x @ params["content"], x @ params["gate"])
    if "index_content" not in params:
        return parts
    return parts._replace(index_content=x @ params["index_content"], index_gate=x @ params["index_gate"])


def aggregate(
    content: Float[Array, "T JD"],
    gate: Float[Array, "T JD"],
    bias: Float[Array, "S JD"],
    norm: Float[Array, " D"],
    starts: Int[Array, " W"],
    epsilon: float,
) -> Float[Array, "W D"]:
    """Entries of the windows that begin at ``starts``, before rotation. The model's own windows begin at multiples of
    ``S``; with two series the window before one that begins at 0 is empty."""
    width, stride = norm.shape[0], bias.shape[0]
    place = starts[:, None] + jnp.arange(stride)[None]
    tokens, scores = content[place], gate[place] + bias[None]
    if content.shape[1] == 2 * width:
        before = place - stride
        earlier = jnp.where((before >= 0)[..., None], (gate[before] + bias[None])[..., :width], -jnp.inf)
        scores = jnp.concatenate([earlier, scores[..., width:]], axis=1)
        tokens = jnp.concatenate([content[before][..., :width], tokens[..., width:]], axis=1)
    return rms_norm(jnp.sum(tokens * jax.nn.softmax(scores, axis=1), axis=1), norm, epsilon)


def window_starts(tokens: int, stride: int) -> Int[Array, " W"]:
    """First tokens of the whole windows of a prompt that begins at position 0."""
    return jnp.arange(tokens // stride) * stride


def keep(params: dict[str, Any], parts: Parts, stride: int, epsilon: float) -> Kept:
    """What a layer keeps of a prompt."""
    starts = window_starts(len(parts.row), stride)
    entry = aggregate(parts.content, parts.gate, params["bias"], params["entry_norm"], starts, epsilon)
    if parts.index_content is None or parts.index_gate is None:
        return Kept(parts.row, entry)
    index = aggregate(
        parts.index_content, parts.index_gate, params["index_bias"], params["index_norm"], starts, epsilon
    )
    return Kept(parts.row, entry, index)


def visible_entries(positions: Int[Array, " M"], windows: int, stride: int) -> Bool[Array, "M W"]:
    """A token sees the entries of windows that have ended, its own position included."""
    return jnp.arange(windows)[None] < ((positions + 1) // stride)[:, None]


def attend(
    params: dict[str, Any],
    config: AggregatedConfig,
    table: RotaryTable,
    x: Float[Array, "T Z"],
    kept: Kept,
    stride: int,
) -> Float[Array, "T Z"]:
    """Attention of all tokens of a prompt to what the layer keeps of them."""
    tokens = x.shape[0]
    heads, width = config.num_attention_heads, config.head_dim
    positions = jnp.arange(tokens)
    low_rank = rms_norm(x @ params["q_down"], params["q_norm"], config.rms_norm_eps)
    query = (low_rank @ params["q"]).reshape(tokens, heads, width)
    query = rms_norm(query, jnp.ones(width, x.dtype), config.rms_norm_eps)
    query = rotate_trailing(query, positions, table)
    starts = window_starts(tokens, stride)
    rows = rotate_trailing(kept.row, positions, table)
    entries = rotate_trailing(kept.entry, starts, table)
    far = visible_entries(positions, len(starts), stride)
    if kept.index_key is not None:
        far = far & _chosen(params, config, table, x, low_rank, kept.index_key, far, starts)
    distance = positions[:, None] - positions[None]
    near = (distance >= 0) & (distance < config.sliding_window)
    keys = jnp.concatenate([rows, entries])
    scores = jnp.einsum("THD,ND->HTN", query, keys) * width**-0.5
    scores = jnp.where(jnp.concatenate([near, far], axis=1)[None], scores, -jnp.inf)
    sink = jnp.broadcast_to(params["sinks"][:, None, None], (heads, tokens, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    out = rotate_trailing(jnp.einsum("HTN,ND->THD", weights, keys), -positions, table)
    grouped = out.reshape(tokens, config.o_groups, -1)
    return jnp.einsum("TGI,GIO->TGO", grouped, params["out_group"]).reshape(tokens, -1) @ params["out"]


def _chosen(params, config, table, x, low_rank, index, far, starts):
    """The ``index_topk`` entries of highest score in view of each token."""
    tokens, heads = len(x), config.index_n_heads
    query = (low_rank @ params["index_query"]).reshape(tokens, heads, -1)
    query = rotate_trailing(query, jnp.arange(tokens), table)
    scores = jax.nn.relu(jnp.einsum("TID,WD->TIW", query, rotate_trailing(index, starts, table)))
    weights = (x @ params["index_weights"]) * (heads * query.shape[-1]) ** -0.5
    scores = jnp.where(far, jnp.einsum("TIW,TI->TW", scores, weights), -jnp.inf)
    best = jax.lax.top_k(scores, min(config.index_topk, scores.shape[1]))[1]
    return jnp.zeros_like(far).at[jnp.arange(tokens)[:, None], best].set(True)


def init(config: AggregatedConfig, seed: int = 0, bias: float = 1.0) -> dict[str, Any]:
    """Random float32 parameters of unit gain, residual branches damped by depth; ``bias`` is the deviation of what the
    places of a window add to gates."""
    draw = np.random.default_rng(seed)
    depth = len(config.kinds)
    z, d, q = config.hidden_size, config.head_dim, config.q_lora_rank
    heads, groups, index = config.num_attention_heads, config.o_groups, config.index_head_dim
    damped = (2 * depth) ** -0.5

    def product(*shape: int, gain: float = 1.0) -> Array:
        return jnp.asarray(draw.standard_normal(shape) * gain / np.sqrt(shape[-2]), jnp.float32)

    def layer(kind: Kind, stride: int) -> dict[str, Any]:
        series = 2 if kind == "sparse" else 1
        params = {
            "attention_norm": jnp.ones(z), "feed_norm": jnp.ones(z),
            "q_down": product(z, q), "q_norm": jnp.ones(q), "q": product(q, heads * d),
            "row": product(z, d), "row_norm": jnp.ones(d),
            "content": product(z, series * d), "gate": product(z, series * d),
            "bias": jnp.asarray(bias * draw.standard_normal((stride, series * d)), jnp.float32),
            "entry_norm": jnp.ones(d), "sinks": jnp.zeros(heads),
            "out_group": product(groups, heads * d // groups, config.o_lora_rank),
            "out": product(groups * config.o_lora_rank, z, gain=damped),
            "feed": {
                "gate": product(z, config.intermediate_size), "up": product(z, config.intermediate_size),
                "down": product(config.intermediate_size, z, gain=damped),
            },
        }  # fmt: skip
        if kind == "sparse":
            params |= {
                "index_content": product(z, 2 * index), "index_gate": product(z, 2 * index),
                "index_bias": jnp.asarray(bias * draw.standard_normal((stride, 2 * index)), jnp.float32),
                "index_norm": jnp.ones(index), "index_query": product(q, config.index_n_heads * index),
                "index_weights": product(z, config.index_n_heads),
            }  # fmt: skip
        return params

    return {
        "embed": product(config.vocab_size, z, gain=np.sqrt(config.vocab_size)),
        "layers": [layer(kind, stride) for kind, stride in zip(config.kinds, config.strides, strict=True)],
        "norm": jnp.ones(z),
        "head": product(config.vocab_size, z, gain=np.sqrt(config.vocab_size / z)),
    }


def forward(
    params: dict[str, Any], config: AggregatedConfig, tokens: Int[Array, " T"], served: list[Any] | None = None
) -> tuple[Float[Array, "T V"], list[tuple[Parts, Kept]]]:
    """Logits of every token, and of each layer what its tokens gave and what it attended to.

    ``served`` replaces what layers attend to: a function of ``Kept`` for each layer.
    """
    table = rotation(config)
    hidden, records = embedding(tokens, params["embed"]), []
    for number, (layer, stride) in enumerate(zip(params["layers"], config.strides, strict=True)):
        x = rms_norm(hidden, layer["attention_norm"], config.rms_norm_eps)
        parts = token_parts(layer, x, config.rms_norm_eps)
        kept = keep(layer, parts, stride, config.rms_norm_eps)
        if served is not None:
            kept = served[number](kept)
        records.append((parts, kept))
        hidden = hidden + attend(layer, config, table, x, kept, stride)
        x = rms_norm(hidden, layer["feed_norm"], config.rms_norm_eps)
        hidden = hidden + swiglu(x, layer["feed"]["gate"], layer["feed"]["up"], layer["feed"]["down"])
    return logits_of(rms_norm(hidden, params["norm"], config.rms_norm_eps), params["head"]), records
