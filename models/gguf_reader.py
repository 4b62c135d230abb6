"""Models from GGUF files: weights of any quantisation that the ``gguf`` package can undo, config, tokenizer.

The converter of llama.cpp reorders the rows of query and key projections of type llama from half-split rotary pairs
``(f, f + K/2)`` to interleaved ones ``(2f, 2f + 1)``; types qwen2 and qwen3 keep theirs. So the layout comes from the
type. Read the other way a file loads without complaint and speaks garbage.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from models.families import Family, Model, abstract, read_config
from models.families import model as from_parameters

INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}

# What a file calls its pre-tokenizer: the pieces it isolates, and whether GPT-2's own split into words follows.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, True),
    "smollm": (r"\p{N}", True),
    "llama-bpe": (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST, False),
    "qwen2": (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST, False),
}
CONTROL, USER_DEFINED = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)


class GGUFFile:
    """A GGUF file, memory-mapped: ``metadata`` values by key, tensors by name, dequantised one at a time."""

    def __init__(self, path: str | Path):
        try:
            self._reader = gguf.GGUFReader(str(path))
        except (ValueError, IndexError) as error:
            raise ValueError(f"{Path(path).name} is not a readable GGUF file ({error}); fetch it again") from error
        self.name = Path(path).name
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, or ``default``."""
        found = self._reader.get_field(key)
        return default if found is None else found.contents()

    def require(self, key: str) -> Any:
        """The value of a metadata key.

        Raises:
          ValueError: if the file does not have it.
        """
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.name}: metadata {key} is missing; convert the model again")
        return value

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def tensor_names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor in float32, published ``[out, in]`` order.

        Raises:
          ValueError: if it is missing, or stored in a form that cannot be undone.
        """
        if name not in self._tensors:
            raise ValueError(f"{self.name}: tensor {name} is missing; convert the model again")
        found = self._tensors[name]
        try:
            return gguf.quants.dequantize(found.data, found.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise ValueError(f"{self.name}: {name} is stored as {found.tensor_type.name}; requantise it") from error


def config_fields(file: GGUFFile) -> dict[str, Any]:
    """The metadata of a file as the ``config.json`` of the same model.

    Raises:
      ValueError: for an architecture that is not read, or one of its features that is not.
    """
    kind = file.require(gguf.Keys.General.ARCHITECTURE)
    if kind not in INTERLEAVED:
        raise ValueError(
            f"{file.name}: general.architecture={kind!r} is not supported; use one of {', '.join(INTERLEAVED)}"
        )
    if "rope_freqs.weight" in file:
        raise ValueError(f"{file.name}: rotary factors in rope_freqs.weight are not supported; use safetensors weights")
    for feature in ("expert_count", "attention.sliding_window"):
        if file.get(f"{kind}.{feature}"):
            raise ValueError(f"{file.name}: {kind}.{feature}={file.get(f'{kind}.{feature}')} is not supported")
    heads, width = file.require(f"{kind}.attention.head_count"), file.require(f"{kind}.embedding_length")
    head_dim = file.get(f"{kind}.attention.key_length", width // heads)
    rotated = file.get(f"{kind}.rope.dimension_count", head_dim)
    return {
        "model_type": kind,
        "vocab_size": len(file.require(gguf.Keys.Tokenizer.LIST)),
        "hidden_size": width,
        "intermediate_size": file.require(f"{kind}.feed_forward_length"),
        "num_hidden_layers": file.require(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.require(f"{kind}.context_length"),
        # Stored as float32: 1e-5 comes back as 9.99999975e-06.
        "rms_norm_eps": float(str(np.float32(file.require(f"{kind}.attention.layer_norm_rms_epsilon")))),
        "rope_parameters": _rope_fields(file, kind),
        "partial_rotary_factor": rotated / head_dim,
        "rope_interleave": INTERLEAVED[kind],
        "tie_word_embeddings": "output.weight" not in file,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in file,
        "bos_token_id": file.get(gguf.Keys.Tokenizer.BOS_ID),
        "eos_token_id": file.get(gguf.Keys.Tokenizer.EOS_ID),
    }


def _rope_fields(file: GGUFFile, kind: str) -> dict[str, Any]:
    scaling = f"{kind}.rope.scaling"
    rope_type = file.get(f"{scaling}.type", "none")
    rope = {
        "rope_type": "default" if rope_type == "none" else rope_type,
        "rope_theta": file.get(f"{kind}.rope.freq_base", 10000.0),
        "factor": file.get(f"{scaling}.factor"),
        "original_max_position_embeddings": file.get(f"{scaling}.original_context_length"),
        "beta_fast": file.get(f"{scaling}.yarn_beta_fast"),
        "beta_slow": file.get(f"{scaling}.yarn_beta_slow"),
    }
    return {name: value for name, value in rope.items() if value is not None}


def published_names(config: Any) -> Callable[[str], str]:
    """A function from a tensor's Hugging Face name to its name in GGUF files."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[config.model_type], config.num_hidden_layers)

    def rename(published: str) -> str:
        return names.get_name(published, try_suffixes=(".weight", ".bias")) or published

    return rename


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer a file describes.

    Raises:
      ValueError: for another kind of tokenizer, or a pre-tokenizer that is not known.
    """
    keys = gguf.Keys.Tokenizer
    kind, splits = file.require(keys.MODEL), file.get(keys.PRE, "gpt-2")
    if kind != "gpt2":
        raise ValueError(f"{file.name}: {keys.MODEL}={kind!r} is not supported; only byte-level BPE ('gpt2') is read")
    if splits not in PRE_TOKENIZERS:
        raise ValueError(f"{file.name}: {keys.PRE}={splits!r} is unknown; use one of {', '.join(PRE_TOKENIZERS)}")
    tokens = file.require(keys.LIST)
    merges = [tuple(merge.split(" ", 1)) for merge in file.require(keys.MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=splits == "llama-bpe"))
    pattern, words = PRE_TOKENIZERS[splits]
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splits == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = file.get(keys.TOKEN_TYPE, [])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    if file.get(keys.ADD_BOS, splits == "llama-bpe"):
        bos = file.require(keys.BOS_ID)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def load_gguf(path: str | Path, dtype: Any = jnp.float32) -> tuple[Model, Tokenizer, str | None]:
    """A model with its tokenizer and chat template (jinja2 source, or None), all from one GGUF file.

    Args:
      path: the file.
      dtype: of weights and arithmetic; stored weights are dequantised into it one tensor at a time.

    Raises:
      ValueError: for a file, architecture or tokenizer that cannot be read, by name.
    """
    file = GGUFFile(path)
    family, config = read_config(config_fields(file))
    model = from_parameters(family, config, _parameters(file, family, config, dtype))
    return model, read_tokenizer(file), file.get(gguf.Keys.Tokenizer.CHAT_TEMPLATE)


def _parameters(file: GGUFFile, family: Family, config: Any, dtype: Any) -> Any:
    shapes = abstract(family, config, dtype)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    rename = published_names(config)
    unused = set(file.tensor_names())
    for tensor in family.tensors(config):
        name = rename(tensor.name)
        array = file.tensor(name)
        if array.shape != tensor.shape:
            raise ValueError(f"{file.name}: {name} has shape {array.shape}, the config asks for {tensor.shape}")
        for (path, index), part in zip(tensor.parts, tensor.unpack(array), strict=True):
            leaf = params
            for key in path:
                leaf = leaf[key]
            leaf[index] = part
        unused.discard(name)
    if unused:
        raise ValueError(f"{file.name}: tensor {min(unused)} belongs to nothing in the model; convert the model again")
    return jax.tree.map(jnp.asarray, params)
