"""Models from GGUF files: weights of any quantisation that the ``gguf`` package can undo, config, tokenizer.

The converter of llama.cpp reorders the rows of query and key projections of type llama from half-split rotary pairs
``(f, f + K/2)`` to interleaved ones ``(2f, 2f + 1)``; types qwen2 and qwen3 keep theirs. So the layout comes from the
type. Read the other way a file loads without complaint and speaks garbage.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from models import families
from models.checkpoint import read_parameters
from models.families import Family, Model
from models.safetensors_reader import CheckpointError, Stored
from models.tokenizer import DEFAULT_TEMPLATE, Tokenizer

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
KEYS = gguf.Keys.Tokenizer
CONTROL, USER_DEFINED = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)


class GGUFFile:
    """A GGUF file, memory-mapped: ``metadata`` values by key, tensors by name, dequantised one at a time."""

    def __init__(self, path: str | Path):
        try:
            self._reader = gguf.GGUFReader(str(path))
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{Path(path).name} is not a readable GGUF file ({error}); fetch it again") from error
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

    def stored(self, published: Mapping[str, str]) -> dict[str, Stored]:
        """Every tensor, dequantised to float32 when read, by its published name or else its own."""
        return {
            published.get(name, name): Stored(
                tuple(int(length) for length in reversed(tensor.shape)),
                np.dtype(np.float32),
                partial(self._dequantised, name),
            )
            for name, tensor in self._tensors.items()
        }

    def _dequantised(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {name!r} of {self.name} is stored as {tensor.tensor_type.name}, which cannot be read; "
                "quantise the model another way"
            ) from error


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
        "vocab_size": len(file.require(KEYS.LIST)),
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
        "bos_token_id": file.get(KEYS.BOS_ID),
        "eos_token_id": file.get(KEYS.EOS_ID),
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


def published_names(family: Family, config: Any) -> dict[str, str]:
    """From the names in GGUF files to those of the published tensors of a model."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[config.model_type], config.num_hidden_layers)
    published = [tensor.name for tensor in family.tensors(config)]
    return {names.get_name(name, try_suffixes=(".weight", ".bias")) or name: name for name in published}


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer of a file, with its chat template.

    Raises:
      ValueError: for another kind of tokenizer, or a pre-tokenizer that is not known.
    """
    tokens = file.require(KEYS.LIST)
    names = {"bos_token": KEYS.BOS_ID, "eos_token": KEYS.EOS_ID, "unk_token": KEYS.UNK_ID, "pad_token": KEYS.PAD_ID}
    ids = {name: file.get(key) for name, key in names.items()}
    template = file.get(KEYS.CHAT_TEMPLATE)
    return Tokenizer(
        _byte_level_bpe(file, tokens),
        {"default": DEFAULT_TEMPLATE if template is None else template},
        {name: tokens[index] for name, index in ids.items() if index is not None},
    )


def _byte_level_bpe(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    kind, splits = file.require(KEYS.MODEL), file.get(KEYS.PRE, "gpt-2")
    if kind != "gpt2":
        raise ValueError(f"{file.name}: {KEYS.MODEL}={kind!r} is not supported; only byte-level BPE ('gpt2') is read")
    if splits not in PRE_TOKENIZERS:
        raise ValueError(f"{file.name}: {KEYS.PRE}={splits!r} is unknown; use one of {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.require(KEYS.MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=splits == "llama-bpe"))
    pattern, words = PRE_TOKENIZERS[splits]
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splits == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    types = file.get(KEYS.TOKEN_TYPE, [])
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    if file.get(KEYS.ADD_BOS, splits == "llama-bpe"):
        bos = file.require(KEYS.BOS_ID)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def load_gguf(path: str | Path, dtype: Any = jnp.bfloat16) -> tuple[Model, Tokenizer]:
    """A model with its tokenizer and chat template, all from one GGUF file.

    Args:
      path: the file.
      dtype: of weights and arithmetic; stored weights are dequantised into it one tensor at a time.

    Raises:
      CheckpointError: for a file that cannot be read, or a missing, extra or misshaped tensor, by name.
      ValueError: for an architecture or tokenizer that is not supported, by name.
    """
    file = GGUFFile(path)
    return read_model(file, dtype), read_tokenizer(file)


def read_model(file: GGUFFile, dtype: Any) -> Model:
    """The model of a file; see ``load_gguf``."""
    family, config = families.read_config(config_fields(file))
    params = read_parameters(family, config, file.stored(published_names(family, config)), dtype)
    return families.model(family, config, params)
