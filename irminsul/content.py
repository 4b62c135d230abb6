"""What a prompt says by itself, whatever a cache holds: its cuts, and the fingerprints of the pieces between them."""

import dataclasses

import numpy as np
import xxhash
from jaxtyping import Int32, UInt64

from irminsul import chunking, fingerprint

ROOT_WINDOW = 16


@dataclasses.dataclass(frozen=True)
class PromptContent:
    """What the content of a prompt says by itself: its cuts and fingerprints, whatever the cache holds.

    Ends are exclusive token indices. ``chunk_ends`` finishes with the prompt's length; ``segment_ends`` are the chunk
    ends behind which a fresh page starts. ``root_fingerprint`` is the chain fingerprint of the first ``ROOT_WINDOW``
    tokens, by which prompts too short to hold a whole chunk find each other. ``window_chunks`` says which chunk each
    window (S1) is a part of.
    """

    tokens: Int32[np.ndarray, " T"]
    chunk_ends: np.ndarray
    segment_ends: np.ndarray
    chunk_fingerprints: UInt64[np.ndarray, " K"]
    chain_fingerprints: UInt64[np.ndarray, " K"]
    root_fingerprint: np.uint64
    anchor_ends: np.ndarray
    anchor_fingerprints: UInt64[np.ndarray, " A"]
    window_chunks: np.ndarray
    window_ends: np.ndarray
    window_fingerprints: UInt64[np.ndarray, " W"]
    window_tokens: int


def read_content(
    tokens: np.ndarray,
    config: chunking.ChunkingConfig,
    key: bytes,
    hash_function: fingerprint.HashFunction = xxhash.xxh64_intdigest,
) -> PromptContent:
    """Cuts a prompt and fingerprints its pieces under ``key`` (namespace, model, adapter, format)."""
    tokens = np.ascontiguousarray(tokens, np.int32)
    cuts = chunking.boundaries(tokens, config)
    seed = fingerprint.key_seed(key, hash_function)
    begins = np.concatenate([np.zeros(1, cuts.chunk_ends.dtype), cuts.chunk_ends[:-1]])
    chunk_fingerprints = fingerprint.range_fingerprints(seed, tokens, begins, cuts.chunk_ends, hash_function)
    root = fingerprint.range_fingerprints(seed, tokens, np.zeros(1, np.int64), np.array([ROOT_WINDOW]), hash_function)
    window_chunks, window_ends = chunking.windows_of_chunks(begins, cuts.chunk_ends, config.window_tokens)
    return PromptContent(
        tokens=tokens,
        chunk_ends=cuts.chunk_ends,
        segment_ends=cuts.segment_ends,
        chunk_fingerprints=chunk_fingerprints,
        chain_fingerprints=fingerprint.chain_fingerprints(seed, chunk_fingerprints, hash_function),
        root_fingerprint=fingerprint.chain_fingerprints(seed, root, hash_function)[0],
        anchor_ends=cuts.anchor_ends,
        anchor_fingerprints=fingerprint.range_fingerprints(
            seed, tokens, cuts.anchor_ends - config.anchor_window, cuts.anchor_ends, hash_function
        ),
        window_chunks=window_chunks,
        window_ends=window_ends,
        window_fingerprints=fingerprint.range_fingerprints(
            seed, tokens, window_ends - config.window_tokens, window_ends, hash_function
        ),
        window_tokens=config.window_tokens,
    )


def extend_content(
    content: PromptContent,
    generated: Int32[np.ndarray, " U"],
    config: chunking.ChunkingConfig,
    key: bytes,
    hash_function: fingerprint.HashFunction = xxhash.xxh64_intdigest,
) -> PromptContent:
    """``read_content`` of a prompt and the tokens behind it, at the cost of the tokens behind its last whole chunk.

    What stands up to there does not depend on what follows; the rolling hash behind it sees no further back than
    ``GEAR_WINDOW`` tokens. Anchors are settled where all runs that may choose them were complete.
    """
    tokens = np.concatenate([content.tokens, generated])
    kept = len(content.chunk_ends) - 1
    begin = int(content.chunk_ends[kept - 1]) if kept else 0
    settled = min(begin, len(content.tokens) - config.anchor_reach)
    back = settled - max(chunking.GEAR_WINDOW, config.anchor_reach)
    if back < 0:
        return read_content(tokens, config, key, hash_function)
    cuts = chunking.boundaries(tokens[back:], config, np.array([begin - back]))
    chunk_ends, segment_ends = (ends[ends > begin - back] + back for ends in (cuts.chunk_ends, cuts.segment_ends))
    anchor_ends = cuts.anchor_ends[cuts.anchor_ends > settled - back] + back
    seed = fingerprint.key_seed(key, hash_function)

    def fingerprints(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return fingerprint.range_fingerprints(seed, tokens, begins, ends, hash_function)

    begins = np.concatenate([[begin], chunk_ends[:-1]])
    chunks = fingerprints(begins, chunk_ends)
    window_chunks, window_ends = chunking.windows_of_chunks(begins, chunk_ends, config.window_tokens)
    windows = int(np.searchsorted(content.window_chunks, kept))
    chain = fingerprint.chain_fingerprints(int(content.chain_fingerprints[kept - 1]), chunks, hash_function)
    anchors = int(np.searchsorted(content.anchor_ends, settled, side="right"))
    segments = int(np.searchsorted(content.segment_ends, begin, side="right"))
    return PromptContent(
        tokens=tokens,
        chunk_ends=np.concatenate([content.chunk_ends[:kept], chunk_ends]),
        segment_ends=np.concatenate([content.segment_ends[:segments], segment_ends]),
        chunk_fingerprints=np.concatenate([content.chunk_fingerprints[:kept], chunks]),
        chain_fingerprints=np.concatenate([content.chain_fingerprints[:kept], chain]),
        root_fingerprint=content.root_fingerprint,
        anchor_ends=np.concatenate([content.anchor_ends[:anchors], anchor_ends]),
        anchor_fingerprints=np.concatenate(
            [content.anchor_fingerprints[:anchors], fingerprints(anchor_ends - config.anchor_window, anchor_ends)]
        ),
        window_chunks=np.concatenate([content.window_chunks[:windows], window_chunks + kept]),
        window_ends=np.concatenate([content.window_ends[:windows], window_ends]),
        window_fingerprints=np.concatenate(
            [content.window_fingerprints[:windows], fingerprints(window_ends - config.window_tokens, window_ends)]
        ),
        window_tokens=config.window_tokens,
    )
