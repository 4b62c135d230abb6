"""A model as a value: parameters, rotary table, static config, and the functions of its family.

A family describes its parameters once, as a tree of ``Parameter``; random initialisation, abstract shapes and
checkpoint checks all read that tree. Layers of one kind are stacked on a leading axis, so a forward scans over them.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.mesh_axes import gathered
from pallas_kernels.rotary import RotaryTable

PRESETS = Path(__file__).parent / "presets"

# Model types this project must not cache: a row that is not a function of one token's place cannot be moved.
REFUSED = {
    "mamba": "its state is recurrent",
    "mamba2": "its state is recurrent",
    "falcon_mamba": "its state is recurrent",
    "falcon_h1": "some of its layers keep a recurrent state",
    "jamba": "some of its layers keep a recurrent state",
    "bamba": "some of its layers keep a recurrent state",
    "zamba2": "some of its layers keep a recurrent state",
    "nemotron_h": "some of its layers keep a recurrent state",
    "granitemoehybrid": "some of its layers keep a recurrent state",
    "kimi_linear": "some of its layers keep a recurrent state",
    "qwen3_next": "some of its layers keep a recurrent state",
    "qwen3_5": "some of its layers keep a recurrent state",
    "rwkv": "its state is recurrent",
    "recurrent_gemma": "some of its layers keep a recurrent state",
    "minimax": "some of its layers keep a recurrent state",
    "deepseek_v4": "its cache rows aggregate several tokens",
}


@dataclass(frozen=True)
class RowFormat:
    """What one token keeps per layer.

    "latent": ``latent_width = C`` values without position and one rotary key of ``rope_width = R``. "grouped":
    ``latent_width = J * D`` values and ``rope_heads = J`` rotary keys, together ``rope_width = J * D`` wide.

    Where attention is sparse ``index_layers`` of the layers keep an indexer key of ``index_width`` values as well, the
    first ``rope_width`` of them rotated by the same frequencies, in the layout ``index_interleaved``.
    """

    kind: Literal["latent", "grouped"]
    num_layers: int
    latent_width: int
    rope_width: int
    interleaved: bool
    rope_heads: int = 1
    index_layers: int = 0
    index_width: int = 0
    index_interleaved: bool = False


@dataclass(frozen=True)
class Parameter:
    """One array: its shape, how a random model starts it, and a dtype of its own where the model's does not apply.

    ``fan_in`` counts the inputs of a product; the start is normal with deviation ``gain / sqrt(fan_in)``.
    """

    shape: tuple[int, ...]
    start: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1
    gain: float = 1.0
    dtype: Any = None


@dataclass(frozen=True)
class Tensor:
    """One tensor of a published checkpoint and the parts of parameters it holds.

    ``parts`` lists ``(path, index)``: a path into the parameter tree and an index into its leading axes (layer,
    expert). ``unpack`` turns the published array into those parts, in order, and ``pack`` turns them back.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[str | int, ...], tuple[int | slice, ...]], ...]
    unpack: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    pack: Callable[..., np.ndarray]


@dataclass(frozen=True)
class Architecture:
    """Config and weights of one architecture, whatever its layers keep; ``config`` is its own frozen dataclass."""

    name: str
    model_types: tuple[str, ...]
    config_from_dict: Callable[[Mapping[str, Any]], Any]
    config_to_dict: Callable[[Any], dict[str, Any]]
    parameters: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterable[Tensor]]
    ignored: Callable[[Any, str], bool]


@dataclass(frozen=True)
class Family(Architecture):
    """An architecture whose layers keep a row a token, and its functions."""

    rotary: Callable[[Any], RotaryTable]
    row_format: Callable[[Any], RowFormat]
    forward: Callable[..., tuple[Array, Any]]
    unembed: Callable[..., Array]


@struct.dataclass
class Model:
    """A model ready to run. ``config``, ``family`` and ``digest`` are static; two weights never share a digest."""

    params: Any
    rotary: RotaryTable
    config: Any = struct.field(pytree_node=False)
    family: Family = struct.field(pytree_node=False)
    digest: str = struct.field(pytree_node=False)

    def __repr__(self) -> str:
        count = sum(getattr(leaf, "size", 0) for leaf in jax.tree.leaves(self.params))  # and not the weights themselves
        return f"Model({self.family.name}, {count:,} parameters, digest={self.digest!r})"

    def forward(
        self, tokens: Int[Array, " M"], positions: Int[Array, " M"], kv: Any
    ) -> tuple[Float[Array, "M D"], Any]:
        """Hidden states after the final norm, and the KV view with the rows of these tokens in it."""
        return self.family.forward(self.params, self.rotary, self.config, tokens, positions, kv)

    def unembed(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Float32 logits, whole on every device of a mesh."""
        return gathered(self.family.unembed(self.params, self.config, hidden))

    def first_layers(self, count: int) -> "Model":
        """The model without the layers behind its first ``count``, for what only needs their rows."""
        config = self.config.first_layers(count)

        def cut(parameter: Parameter, leaf: Array) -> Array:
            return leaf if leaf.shape == parameter.shape else leaf[: parameter.shape[0]]

        wanted = self.family.parameters(config)
        kept = {name: self.params[name] for name in wanted}
        params = jax.tree.map(cut, wanted, kept, is_leaf=lambda leaf: isinstance(leaf, Parameter))
        return dataclasses.replace(self, params=params, config=config)

    @property
    def row_format(self) -> RowFormat:
        """What a token keeps in a layer."""
        return self.family.row_format(self.config)

    @property
    def vocab_size(self) -> int:
        """Token ids, ``V``."""
        return self.config.vocab_size

    @property
    def max_position(self) -> int:
        """Positions the model was made for; no prompt and answer may be longer together."""
        return self.config.max_position_embeddings

    @property
    def uniform_positions(self) -> int:
        """Positions, from 0, at which a query is the same but for its rotation; beyond them some models scale it."""
        rope = self.config.rope_parameters
        return rope.original_max_position_embeddings if rope.llama_4_scaling_beta else self.max_position

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and arithmetic, norms and softmax aside."""
        return self.params["embed"].dtype


def families() -> tuple[Family, ...]:
    """Every family there is."""
    from models import gqa, mla  # families build on this module

    return (mla.FAMILY, gqa.FAMILY)


def family_of(model_type: str | None) -> Family:
    """The family of a Hugging Face ``model_type``.

    Raises:
      ValueError: for a type whose cache rows cannot be moved, by name and with the reason, or an unknown one.
    """
    if model_type in REFUSED:
        raise ValueError(refusal(model_type))
    known = families()
    for family in known:
        if model_type in family.model_types:
            return family
    names = sorted(name for family in known for name in family.model_types)
    raise ValueError(f"model_type={model_type!r} is unknown; use one of {', '.join(names)}")


def refusal(model_type: str) -> str:
    """Why the cache of a model of this type cannot be moved, in a sentence."""
    return (
        f"model_type={model_type!r} is refused because {REFUSED[model_type]}, so its cache cannot be reused at another "
        "position; serve it without this cache, or exact prefixes from irminsul.snapshots if models.recurrent knows it"
    )


def is_parameter(leaf: Any) -> bool:
    """Leaf test for trees of ``Parameter``."""
    return isinstance(leaf, Parameter)


def abstract(family: Architecture, config: Any, dtype: Any = jnp.bfloat16) -> Any:
    """The parameter tree as ``jax.ShapeDtypeStruct``: shapes of any model, at no memory."""

    def shape(parameter: Parameter) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype or dtype)

    return jax.tree.map(shape, family.parameters(config), is_leaf=is_parameter)


def init(family: Architecture, config: Any, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """Random parameters: normal with deviation ``gain / sqrt(fan_in)``, norms 1, biases 0.

    Drawn by numpy on the host, so that a seed means the same weights on every device and nothing is compiled.
    """
    draw = np.random.default_rng(seed)

    def start(parameter: Parameter) -> Array:
        kind = parameter.dtype or dtype
        if parameter.start != "normal":
            return (jnp.ones if parameter.start == "ones" else jnp.zeros)(parameter.shape, kind)
        values = draw.standard_normal(parameter.shape, np.float32)
        values *= np.float32(parameter.gain / math.sqrt(parameter.fan_in))
        return jnp.asarray(values, kind)

    return jax.tree.map(start, family.parameters(config), is_leaf=is_parameter)


def parameter_count(tree: Any) -> int:
    """Numbers in a parameter tree, concrete or abstract."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def digest_of(params: Any) -> str:
    """xxHash64 over names, shapes, dtypes and bytes of all parameters: what cached rows are keyed by."""
    digest = xxhash.xxh64()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def model(family: Family, config: Any, params: Any) -> Model:
    """Puts parameters behind their family's functions."""
    return Model(params, family.rotary(config), config, family, digest_of(params))


def presets() -> list[str]:
    """Names of the published shapes that come with the project."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def preset(name: str) -> dict[str, Any]:
    """The ``config.json`` of a published shape.

    Raises:
      ValueError: for an unknown name, listing the known ones.
    """
    if name not in presets():
        raise ValueError(f"preset {name!r} is unknown; use one of {', '.join(presets())}")
    return json.loads((PRESETS / f"{name}.json").read_text())


def read_config(source: str | Mapping[str, Any], **overrides: Any) -> tuple[Family, Any]:
    """Family and config of a preset name or a ``config.json`` mapping; keywords replace its fields."""
    fields = {**(preset(source) if isinstance(source, str) else source), **overrides}
    family = family_of(fields.get("model_type"))
    return family, family.config_from_dict(fields)


def random_model(source: str | Mapping[str, Any], seed: int = 0, dtype: Any = jnp.float32, **overrides: Any) -> Model:
    """A model with random weights.

    Args:
      source: a preset's name or a ``config.json`` mapping.
      seed: of the weights.
      dtype: of weights and arithmetic.
      overrides: Hugging Face config fields to replace, e.g. ``num_hidden_layers=2``.

    Raises:
      ValueError: for an unknown preset or fields that contradict each other.
    """
    family, config = read_config(source, **overrides)
    return model(family, config, init(family, config, seed, dtype))
