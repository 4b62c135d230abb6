"""Blocks of text put at several places of a model's context, and the rows they leave there.

A *placement* says where a block stands: behind the first ``length`` tokens of a context that begins at position
``start``, so at position ``start + length``. Changing ``start`` alone moves a block and all it can see; changing the
context alone leaves it where it is. Contexts are run once each and blocks branch off from their rows.
"""

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from experiments import recording
from experiments.errors import InputError
from experiments.recording import Rows
from models.families import Model

EDITED_EVERY = 8
# Quantity -> [blocks, placements, L, tokens, width]; one token where rows were averaged.
Features = dict[str, np.ndarray]
NegativePosition = Literal["any", "other", "same"]


class Placement(NamedTuple):
    """``context`` is an index; with ``length`` 0 nothing stands to the left."""

    context: int
    start: int
    length: int


@dataclass(frozen=True)
class Texts:
    """Token ids. ``neighbours[i]`` follows ``blocks[i]`` in its document; ``edited[i]`` is ``blocks[i]`` with every
    eighth token replaced."""

    blocks: Int[np.ndarray, "N B"]
    neighbours: Int[np.ndarray, "N B"]
    edited: Int[np.ndarray, "N B"]
    contexts: Int[np.ndarray, "X T"]


@dataclass(frozen=True)
class Pairs:
    """Block and placement of either side of each pair."""

    block: Int[np.ndarray, " P"]
    place: Int[np.ndarray, " P"]
    other_block: Int[np.ndarray, " P"]
    other_place: Int[np.ndarray, " P"]


def draw_texts(
    documents: Iterable[np.ndarray],
    blocks: int,
    block_tokens: int,
    contexts: int,
    length: int,
    rng: np.random.Generator,
) -> Texts:
    """Contexts from some documents, blocks from others, no token used twice.

    Raises:
      InputError: if the text is too short.
    """
    documents = list(documents)
    rng.shuffle(documents)
    parts, filled, used = [], 0, 0
    while filled < contexts * length and used < len(documents):
        parts.append(documents[used])
        filled, used = filled + len(documents[used]), used + 1
    windows = [
        document[begin : begin + 2 * block_tokens]
        for document in documents[used:]
        for begin in range(0, len(document) - 2 * block_tokens + 1, 2 * block_tokens)
    ]
    if filled < contexts * length or len(windows) < blocks:
        raise InputError(
            f"text holds {len(windows)} pairs of blocks beside its contexts, too few for blocks={blocks} and "
            f"contexts={contexts} of {length} tokens; name more text or ask for fewer"
        )
    chosen = np.stack([windows[index] for index in rng.permutation(len(windows))[:blocks]])
    edited = chosen[:, :block_tokens].copy()
    edited[:, ::EDITED_EVERY] = rng.choice(chosen.ravel(), edited[:, ::EDITED_EVERY].shape)
    text = np.concatenate(parts)[: contexts * length].reshape(contexts, length)
    return Texts(chosen[:, :block_tokens], chosen[:, block_tokens:], edited, text)


class Contexts:
    """Contexts of one model and their rows, each computed once; a shorter context is the beginning of a longer one."""

    def __init__(self, model: Model, tokens: Int[np.ndarray, "X T"]):
        self.model, self.tokens = model, tokens
        self._rows: dict[tuple[int, int], Rows] = {}

    def rows(self, context: int, start: int, length: int) -> Rows:
        """At least ``length`` rows of a context that begins at ``start``: all of them where it begins at 0."""
        if (context, start) not in self._rows:
            tokens = self.tokens[context] if start == 0 else self.tokens[context, :length]
            self._rows[context, start] = recording.run_text(self.model, jnp.asarray(tokens), jnp.int32(start))
        return self._rows[context, start]


def place_blocks(
    contexts: Contexts,
    blocks: Int[np.ndarray, "N B"],
    placements: Sequence[Sequence[Placement]],
    *,
    batch: int,
    pooled: bool,
    label: str = "placing blocks",
) -> Features:
    """Rows of every block at each of its placements (as many for every block).

    Args:
      placements: per block.
      batch: blocks run at once.
      pooled: keep only the mean over a block's tokens.
    """
    places = [(place, block, index) for block, row in enumerate(placements) for index, place in enumerate(row)]
    places.sort()
    model, features = contexts.model, {}
    with tqdm(total=len(places), desc=label, unit=" blocks", leave=False, file=sys.stderr) as progress:
        for place, group in itertools.groupby(places, key=lambda item: item[0]):
            members = list(group)
            left = contexts.rows(*place) if place.length else recording.no_rows(model)
            for begin in range(0, len(members), batch):
                part = members[begin : begin + batch]
                index = [block for _, block, _ in part]
                tokens = jnp.asarray(blocks[np.resize(index, batch)])  # padded by repetition: one compiled shape
                position = jnp.int32(place.start + place.length)
                rows = recording.run_blocks(model, tokens, position, left, place.length).rows
                for name, values in _quantities(model, rows, pooled).items():
                    if name not in features:
                        shape = (len(blocks), len(placements[0]), *values.shape[1:])
                        features[name] = np.full(shape, np.nan, np.float32)
                    features[name][index, [which for _, _, which in part]] = values[: len(part)]
                progress.update(len(part))
    return features


def _quantities(model: Model, rows: Rows, pooled: bool) -> dict[str, Float[np.ndarray, "N L B W"]]:
    """What can be compared: the part without position, keys as stored, and keys turned back to position 0."""
    names = ("c_kv", "k_r", "k_r_corrected") if model.row_format.kind == "latent" else ("v", "k", "k_corrected")
    found = {}
    for name, array in zip(names, (rows.latent, rows.keys, _turned_back(model, rows)), strict=True):
        values = np.asarray(array, np.float32).reshape(*array.shape[:3], -1)
        found[name] = values.mean(axis=2, keepdims=True) if pooled else values
    return found


@jax.jit
def _turned_back(model: Model, rows: Rows) -> Float[Array, "N L B J R"]:
    return jax.vmap(lambda keys, positions: recording.turn(keys, -positions, model.rotary))(rows.keys, rows.positions)


# Pairs and how alike they are


def same_content(blocks: int, places: int) -> Pairs:
    """Every block with itself at each two of its placements."""
    first, second = np.triu_indices(places, 1)
    block = np.repeat(np.arange(blocks), len(first))
    return Pairs(block, np.tile(first, blocks), block, np.tile(second, blocks))


def other_content(
    same: Pairs, blocks: int, places: int, rng: np.random.Generator, where: NegativePosition = "any"
) -> Pairs:
    """A pair of different contents for each pair of the same: the same first side, another block on the second.

    ``where`` is its placement: ``any`` (the first side's own included), any ``other``, or the ``same``.
    """
    count = len(same.block)
    shift = rng.integers(1, blocks, count)
    step = {"any": rng.integers(0, places, count), "other": rng.integers(1, places, count), "same": 0}[where]
    return Pairs(same.block, same.place, (same.block + shift) % blocks, (same.place + step) % places)


def twins(same: Pairs, places: int, rng: np.random.Generator) -> Pairs:
    """Each pair's first side with the block of the same index in another set, at a random one of its placements."""
    return Pairs(same.block, same.place, same.block, rng.integers(0, places, len(same.block)))


def similarity(
    left: np.ndarray, right: np.ndarray, pairs: Pairs, pooling: str = "mean", chunk: int = 64
) -> tuple[Float[np.ndarray, "P L"], Float[np.ndarray, "P L"]]:
    """Cosine similarity and relative L2 distance of each pair in each layer.

    Args:
      left, right: features of one quantity ``[N, places, L, tokens, W]``.
      pooling: ``mean`` compares mean rows; ``token`` rows one by one, then averages; ``concatenated`` all rows at once.

    Raises:
      InputError: for another pooling.
    """
    if pooling not in ("mean", "token", "concatenated"):
        raise InputError(f"pooling={pooling!r} is unknown; choose mean, token or concatenated")
    cosines, distances = [], []
    for begin in range(0, len(pairs.block), chunk):
        part = slice(begin, begin + chunk)
        a = left[pairs.block[part], pairs.place[part]]
        b = right[pairs.other_block[part], pairs.other_place[part]]
        if pooling == "mean":
            a, b = a.mean(axis=2, keepdims=True), b.mean(axis=2, keepdims=True)
        elif pooling == "concatenated":
            a, b = (rows.reshape(*rows.shape[:2], 1, -1) for rows in (a, b))
        norm_a, norm_b = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
        cosines.append(((a * b).sum(axis=-1) / (norm_a * norm_b)).mean(axis=2))
        distances.append((np.linalg.norm(a - b, axis=-1) / norm_a).mean(axis=2))
    return np.concatenate(cosines), np.concatenate(distances)
