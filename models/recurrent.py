"""Models with recurrent layers as a value: Mamba2, Gated DeltaNet hybrids, Kimi Delta Attention hybrids.

Their state is what distinguishes them from everything else here. A recurrent layer keeps one memory of fixed size, a
function of every token so far *in order*, not a row per token: there is nothing that could be taken out for some tokens
and put elsewhere. So a cache may serve an exact prefix (``snapshot`` and ``rewind``) and must refuse shifted reuse
(``row_format``, ``irminsul/snapshots``). A hybrid's attention layers do keep rows, but what they are computed from, and
what every layer above them reads, has passed through recurrent layers: with all rows at hand nearly every product still
runs (``models/recurrent_cost``).

Layers are not stacked and scanned over, as elsewhere: hybrids mix kinds, and a scan would copy the weights of a layer
(gigabytes of experts) out of the stack at every step. ``prefill`` calls one compiled program per kind of layer instead.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from models import families, layers
from models.families import Architecture, Parameter, RowFormat, is_parameter
from models.hybrid_attention import capacity_of
from pallas_kernels.rotary import RotaryTable

PRESETS = Path(__file__).parent / "presets" / "recurrent"
BLOCK = 512


@dataclass(frozen=True)
class RecurrentFamily(Architecture):
    """An architecture with recurrent layers, and its functions.

    ``kind(config, layer)`` names what decides the program of a layer; names that begin with "attention" keep rows, all
    others a memory. ``layer(params, config, kind, rotary, hidden, kept, start, count, reuse)`` is one layer: ``kept``
    is its memory or rows, ``start`` the position of the first of the tokens, ``count`` how many of them count,
    ``reuse`` whether their rows are in the buffer already.
    """

    rotary: Callable[[Any], RotaryTable | None]
    kind: Callable[[Any, int], str]
    empty: Callable[[Any, str, int, int, Any], Any]
    layer: Callable[..., tuple[Array, Any]]
    final_norm: Callable[[dict[str, Any], Any, Array], Array]
    residual_dtype: Callable[[Any, Any], Any]


@struct.dataclass
class RecurrentModel:
    """A model ready to run. ``config``, ``family`` and ``digest`` are static; two weights never share a digest."""

    params: Any
    rotary: RotaryTable | None
    config: Any = struct.field(pytree_node=False)
    family: RecurrentFamily = struct.field(pytree_node=False)
    digest: str = struct.field(pytree_node=False)

    @property
    def vocab_size(self) -> int:
        """Token ids, ``V``."""
        return self.config.vocab_size

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and products; decays, memories, norms and softmax are float32."""
        return self.params["embed"].dtype

    def empty_state(self, batch: int, capacity: int) -> "State":
        """``empty_state`` of this model."""
        return empty_state(self, batch, capacity)

    def prefill(self, tokens: Any, state: "State", *, block: int) -> tuple[Float[Array, "B V"], "State"]:
        """``prefill`` of this model."""
        return prefill(self, tokens, state, block=block)

    @property
    def row_format(self) -> RowFormat:
        """Raises ``ValueError``: there are no rows that could stand elsewhere. Whoever asks means to move them."""
        raise ValueError(families.refusal(self.config.model_type))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each layer is."""
        return tuple(self.family.kind(self.config, layer) for layer in range(self.config.num_hidden_layers))


@struct.dataclass
class Snapshot:
    """What recurrent layers hold behind ``length`` tokens; ``None`` where a layer keeps rows instead."""

    length: np.int32 | Int[Array, ""]
    memories: tuple[Any, ...]


@struct.dataclass
class State:
    """Everything a batch of sequences, all ``length`` tokens long, keeps: memories, and rows of attention layers.

    ``rows`` are buffers of ``capacity`` rows; those behind ``length`` are never read. ``length`` is kept on the host,
    so that the next block can be checked and dispatched while this one runs.
    """

    length: np.int32 | Int[Array, ""]
    memories: tuple[Any, ...]
    rows: tuple[Any, ...]
    batch: int = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)


def recurrent_families() -> tuple[RecurrentFamily, ...]:
    """Every family with recurrent layers."""
    from models import gated_delta, kda, mamba2  # families build on this module

    return (mamba2.FAMILY, gated_delta.FAMILY, kda.FAMILY)


def presets() -> list[str]:
    """Names of the shapes that come with the project."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_config(source: str | Mapping[str, Any], **overrides: Any) -> tuple[RecurrentFamily, Any]:
    """Family and config of a preset name or a ``config.json`` mapping; keywords replace its fields.

    Raises:
      ValueError: for an unknown preset or model type, or fields that contradict each other.
    """
    if isinstance(source, str):
        if source not in presets():
            raise ValueError(f"preset {source!r} is unknown; use one of {', '.join(presets())}")
        fields = json.loads((PRESETS / f"{source}.json").read_text())
    else:
        fields = dict(source)
    fields |= overrides
    known = recurrent_families()
    for family in known:
        if fields.get("model_type") in family.model_types:
            return family, family.config_from_dict(fields)
    names = sorted(name for family in known for name in family.model_types)
    raise ValueError(f"model_type={fields.get('model_type')!r} has no recurrent family; use one of {', '.join(names)}")


def model(family: RecurrentFamily, config: Any, params: Any, digest: str | None = None) -> RecurrentModel:
    """Puts parameters behind their family's functions; without ``digest`` that of the weights is computed."""
    return RecurrentModel(params, family.rotary(config), config, family, digest or families.digest_of(params))


def random_model(
    source: str | Mapping[str, Any], seed: int = 0, dtype: Any = jnp.float32, **overrides: Any
) -> RecurrentModel:
    """A model with random weights, drawn on the device.

    Raises:
      ValueError: as ``read_config``.
    """
    family, config = read_config(source, **overrides)
    params = init_on_device(family, config, jax.random.key(seed), dtype)
    # Hashing the weights would bring them to the host; shape, seed and generator say as much.
    fields = json.dumps(family.config_to_dict(config), sort_keys=True)
    return model(family, config, params, digest=f"random {seed} {jnp.dtype(dtype).name} {fields}")


def init_on_device(family: RecurrentFamily, config: Any, key: Array, dtype: Any = jnp.bfloat16) -> Any:
    """Random parameters, leaf by leaf on the default device, in their own dtype: no copy on the host or in float32."""
    leaves, tree = jax.tree.flatten(family.parameters(config), is_leaf=is_parameter)
    drawn = [
        _draw(jax.random.fold_in(key, index), parameter, jnp.dtype(parameter.dtype or dtype))
        for index, parameter in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, drawn)


@partial(jax.jit, static_argnames=("parameter", "dtype"))
def _draw(key: Array, parameter: Parameter, dtype: Any) -> Array:
    if parameter.start != "normal":
        return (jnp.ones if parameter.start == "ones" else jnp.zeros)(parameter.shape, dtype)
    deviation = parameter.gain / math.sqrt(parameter.fan_in)
    return jax.random.normal(key, parameter.shape, dtype) * jnp.asarray(deviation, dtype)


def empty_state(model: RecurrentModel, batch: int, capacity: int) -> State:
    """The state ahead of the first token, with room for the attention rows of ``capacity`` tokens."""
    if batch < 1 or capacity < 1:
        raise ValueError(f"batch={batch} and capacity={capacity} must be at least 1; give the size of the batch")
    rows = capacity_of(capacity)
    kept = [model.family.empty(model.config, kind, batch, rows, model.dtype) for kind in model.kinds]
    attention = [kind.startswith("attention") for kind in model.kinds]
    return State(
        np.int32(0),
        tuple(None if keeps_rows else own for own, keeps_rows in zip(kept, attention, strict=True)),
        tuple(own if keeps_rows else None for own, keeps_rows in zip(kept, attention, strict=True)),
        batch,
        capacity,
    )


def snapshot(state: State) -> Snapshot:
    """What must be kept to serve this prefix again: its rows aside, memories of a size that no length changes."""
    return Snapshot(state.length, state.memories)


def rewind(state: State, earlier: Snapshot) -> State:
    """The state as it was at ``earlier``, if ``state`` has come from there: its rows up to there are still there."""
    return dataclasses.replace(state, length=earlier.length, memories=earlier.memories)


def prefill(
    model: RecurrentModel,
    tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"],
    state: State,
    *,
    block: int = BLOCK,
    reused: int = 0,
) -> tuple[Float[Array, "B V"], State]:
    """Logits after the last token, and the state behind it.

    Blocks of ``block`` tokens, the last one padded, each through all layers: one compiled program per kind of layer,
    whatever the length. Splits at multiples of ``block`` give the same bits, others agree within rounding. The rows of
    ``state`` are taken over; its memories stay valid, so an earlier ``snapshot`` does.

    Args:
      reused: leading tokens whose attention rows are in ``state`` already, from elsewhere. They save the projections of
        keys and values there and everything behind the last recurrent layer, no more: a measure of what shifted reuse
        could save, whose results are those of the rows it was given.

    Raises:
      ValueError: for tokens of another shape than the state, or more than it has room for.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    _check(tokens, state, block, reused)
    recurrent = [index for index, kind in enumerate(model.kinds) if not kind.startswith("attention")]
    hidden = None
    for begin in range(0, tokens.shape[1], block):
        count = min(block, tokens.shape[1] - begin)
        part = jnp.pad(tokens[:, begin : begin + count], ((0, 0), (0, block - count)))
        reuse = begin + block <= reused
        depth = recurrent[-1] + 1 if reuse else len(model.kinds)
        hidden, state = run_block(model, part, state, np.int32(count), depth=depth, reuse=reuse)
    assert hidden is not None
    last = np.int32((tokens.shape[1] - 1) % block)
    return _logits(model.params, hidden, last, family=model.family, config=model.config), state


def run_block(
    model: RecurrentModel,
    tokens: Int[Array, "B M"] | Int[np.ndarray, "B M"],
    state: State,
    count: np.int32 | Int[Array, ""],
    *,
    depth: int | None = None,
    reuse: bool = False,
) -> tuple[Float[Array, "B M D"], State]:
    """One block through the first ``depth`` layers (all by default): the residual stream, and the next state."""
    hidden = _embed(model.params["embed"], tokens, family=model.family, config=model.config)
    memories, rows = list(state.memories), list(state.rows)
    for index, kind in enumerate(model.kinds[:depth]):
        hidden, memories[index], rows[index] = _layer(
            model.params["layers"][index], model.rotary, hidden, memories[index], rows[index], state.length, count,
            family=model.family, config=model.config, kind=kind, reuse=reuse and kind.startswith("attention"),
        )  # fmt: skip
    return hidden, dataclasses.replace(state, length=state.length + count, memories=tuple(memories), rows=tuple(rows))


def _check(tokens: Array, state: State, block: int, reused: int) -> None:
    if tokens.ndim != 2 or tokens.shape[0] != state.batch or tokens.shape[1] < 1:
        raise ValueError(
            f"tokens has shape {tokens.shape}; the state is of {state.batch} sequences of 1 or more tokens"
        )
    if block < 1 or not 0 <= reused < tokens.shape[1]:
        raise ValueError(f"block={block} must be at least 1 and reused={reused} below the {tokens.shape[1]} tokens")
    if not any(rows is not None for rows in state.rows) or isinstance(state.length, jax.core.Tracer):
        return
    room, end = capacity_of(state.capacity), int(state.length) + -(-tokens.shape[1] // block) * block
    if end > room:
        raise ValueError(
            f"capacity={state.capacity} leaves no room for {tokens.shape[1]} tokens behind {int(state.length)} in "
            f"blocks of {block}; make the state with capacity={end} or more"
        )


@partial(jax.jit, static_argnames=("family", "config"))
def _embed(table: Array, tokens: Array, *, family: RecurrentFamily, config: Any) -> Array:
    return layers.embedding(tokens, table).astype(family.residual_dtype(config, table.dtype))


@partial(jax.jit, static_argnames=("family", "config", "kind", "reuse"), donate_argnames=("hidden", "rows"))
def _layer(
    params: Any, rotary: RotaryTable | None, hidden: Array, memory: Any, rows: Any, start: Array, count: Array,
    *, family: RecurrentFamily, config: Any, kind: str, reuse: bool,
) -> tuple[Array, Any, Any]:  # fmt: skip
    attention = kind.startswith("attention")
    kept = rows if attention else memory
    hidden, kept = family.layer(params, config, kind, rotary, hidden, kept, start, count, reuse)
    return (hidden, memory, kept) if attention else (hidden, kept, rows)


@partial(jax.jit, static_argnames=("family", "config"))
def _logits(params: Any, hidden: Array, last: Array, *, family: RecurrentFamily, config: Any) -> Array:
    """Logits of one token of each sequence."""
    chosen = jax.lax.dynamic_index_in_dim(hidden, last, axis=1, keepdims=False)
    return unembed(params, family, config, chosen)


def unembed(params: Any, family: RecurrentFamily, config: Any, hidden: Float[Array, "*batch D"]) -> Array:
    """Float32 logits of the residual stream behind the last layer."""
    hidden = family.final_norm(params, config, hidden)
    return layers.unembed(hidden, params["embed" if config.tie_word_embeddings else "head"])
