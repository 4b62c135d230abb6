"""How published tensors map to parameters. Published linear layers are ``[out, in]``, those here ``[in, out]``."""

import math

import numpy as np

from models.families import Tensor

Path = tuple[str | int, ...]


def verbatim(name: str, shape: tuple[int, ...], path: Path, *index: int) -> Tensor:
    """A tensor kept as published."""
    return Tensor(name, shape, ((path, index),), lambda array: (array,), lambda part: part)


def linear(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], path: Path, *index: int) -> Tensor:
    """A linear layer, transposed; several input or output axes (heads) are flattened in the published form."""
    flat = (math.prod(outputs), math.prod(inputs))
    return Tensor(
        name,
        flat,
        ((path, index),),
        lambda array: (array.T.reshape(*inputs, *outputs),),
        lambda part: part.reshape(flat[1], flat[0]).T,
    )


def head_bias(name: str, heads: tuple[int, int], path: Path, *index: int) -> Tensor:
    """A bias, published flat, kept by head."""
    flat = (math.prod(heads),)
    return Tensor(name, flat, ((path, index),), lambda array: (array.reshape(heads),), lambda part: part.reshape(flat))


def split_linear(name: str, sizes: tuple[int, int, int, int], uk: Path, uv: Path, *index: int) -> Tensor:
    """``kv_b_proj``: per head ``W_UK [K, C]`` above ``W_UV [V, C]``; kept as ``[H, K, C]`` and ``[H, C, V]``."""
    heads, nope, value, latent = sizes

    def unpack(array: np.ndarray) -> tuple[np.ndarray, ...]:
        per_head = array.reshape(heads, nope + value, latent)
        return per_head[:, :nope], per_head[:, nope:].swapaxes(1, 2)

    def pack(w_uk: np.ndarray, w_uv: np.ndarray) -> np.ndarray:
        return np.concatenate([w_uk, w_uv.swapaxes(1, 2)], axis=1).reshape(heads * (nope + value), latent)

    return Tensor(name, (heads * (nope + value), latent), ((uk, index), (uv, index)), unpack, pack)


def linears(name: str, sizes: tuple[int, int, int], path: Path, *index: int) -> Tensor:
    """Linear layers of all experts in one tensor ``[E, out, in]``, kept as ``[E, in, out]``."""
    experts, inputs, outputs = sizes
    return Tensor(
        name,
        (experts, outputs, inputs),
        ((path, index),),
        lambda array: (array.swapaxes(1, 2),),
        lambda part: part.swapaxes(1, 2),
    )


def fused_gate_up(name: str, sizes: tuple[int, int, int], gate: Path, up: Path, *index: int) -> Tensor:
    """``gate_up_proj`` of all experts ``[E, 2 F, D]``, gate above up; kept as two ``[E, D, F]``."""
    experts, width, inner = sizes

    def unpack(array: np.ndarray) -> tuple[np.ndarray, ...]:
        return array[:, :inner].swapaxes(1, 2), array[:, inner:].swapaxes(1, 2)

    def pack(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.concatenate([gate.swapaxes(1, 2), up.swapaxes(1, 2)], axis=1)

    return Tensor(name, (experts, 2 * inner, width), ((gate, index), (up, index)), unpack, pack)


def depthwise(name: str, channels: int, width: int, path: Path) -> Tensor:
    """A depthwise convolution, published ``[channels, 1, width]``, kept ``[width, channels]``."""

    def unpack(array: np.ndarray) -> tuple[np.ndarray, ...]:
        return (array[:, 0].T,)

    return Tensor(name, (channels, 1, width), ((path, ()),), unpack, lambda part: part.T[:, None])
