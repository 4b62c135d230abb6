"""The content cache: pool, page tree, registry and clock as one value.

A step takes a ``ContentCache`` and returns the next one. The old one is consumed, host arrays included, unless the
step was called with ``donate=False``; using it again raises ``ConsumedError``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Int32

from irminsul import page_tree, registry
from irminsul.chunking import ChunkingConfig
from irminsul.eviction import Eviction
from irminsul.page_tree import PageTree
from irminsul.pool import LatentPool
from irminsul.provenance import Provenance
from irminsul.registry import Registry
from irminsul.row_quantisation import ROW_DTYPES
from irminsul.sharded_pool import new_pool
from pallas_kernels.page_table import Storage


class ConsumedError(RuntimeError):
    """A cache was used after a step had taken it over."""


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Static shape of a cache.

    Fields:
      num_pages: pages in the pool (``N``).
      page_size: rows a page (``G``).
      max_prompt_tokens: capacity of the compiled prefill.
      max_new_tokens: rows that decoding may add to one request.
      storage: rotary keys kept rotated at their ``base`` position, or ``unrotated``.
      dtype: of the rows (``row_quantisation.ROW_DTYPES``).
      eviction: which pages go when the pool is full (``eviction.py``): ``lru`` or by ``value``.
      dependence: keep with each token how far left its attention went (``dependence.py``), which repair goes by.
      chunking: cuts, segments and anchors.
    """

    num_pages: int
    page_size: int = 64
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 256
    storage: Storage = "base"
    dtype: str = "float32"
    eviction: Eviction = "lru"
    dependence: bool = True
    chunking: ChunkingConfig = ChunkingConfig()

    def __post_init__(self):
        for name in ("num_pages", "page_size", "max_prompt_tokens", "max_new_tokens"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise ValueError(f"{name}={getattr(self, name)!r} must be an integer")
        for name in ("num_pages", "page_size", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must not be negative")
        if self.storage not in ("base", "unrotated"):
            raise ValueError(f"storage={self.storage!r} is unknown; choose 'base' or 'unrotated'")
        if self.dtype not in ROW_DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(ROW_DTYPES)}")
        if self.eviction not in ("lru", "value"):
            raise ValueError(f"eviction={self.eviction!r} is unknown; choose 'lru' or 'value'")

    @property
    def table_entries(self) -> int:
        """Entries of a page table (``S``): four a page of tokens, and never fewer than a prompt served without shifted
        rows can need (its pages are full or end a segment, so at most one a page and one a chunk)."""
        pages = -(-(self.max_prompt_tokens + self.max_new_tokens) // self.page_size)
        return max(4 * pages, pages + self.chunking.most_chunks(self.max_prompt_tokens)) + 8

    @property
    def planned_entries(self) -> int:
        """Entries that prefill may use; the others are kept for the tokens that decoding adds."""
        return self.table_entries - -(-self.max_new_tokens // self.page_size) - 1


@struct.dataclass
class ContentCache:
    """Everything a cache knows. ``pool`` is None for a cache that only plans.

    ``namespaces`` lists the keys (``cache_key.request_key``) in order of first use; a page belongs to one of them by
    index. ``in_flight`` counts, per page, the requests between ``prefill`` and ``complete`` that read or write it; such
    a page is never given away. ``clock`` counts steps; the tree counts along, which is how a consumed cache is told
    from a current one. ``provenance`` says behind which rows each request computed its own.
    """

    pool: LatentPool | None
    tree: PageTree
    registry: Registry
    in_flight: Int32[np.ndarray, " N"]
    clock: int
    namespaces: tuple[bytes, ...] = struct.field(pytree_node=False)
    config: CacheConfig = struct.field(pytree_node=False)
    provenance: Provenance = struct.field(pytree_node=False, default_factory=Provenance)

    def __repr__(self) -> str:
        pages = f"{self.config.num_pages} pages of {self.config.page_size} rows"  # and not what is in them
        return f"ContentCache({pages}, {len(self.namespaces)} namespaces, clock={self.clock})"

    def require_alive(self) -> None:
        """Raises ``ConsumedError`` if a step has taken this cache over."""
        if self.clock != int(self.tree.clock) or (self.pool is not None and self.pool.is_deleted()):
            raise ConsumedError(
                f"cache at clock={self.clock} was consumed by a later step; keep the cache that step returned, "
                "or pass donate=False"
            )

    def copy(self) -> "ContentCache":
        """An independent cache with the same content."""
        self.require_alive()
        pool = jax.tree.map(jnp.copy, self.pool)
        return dataclasses.replace(
            self,
            pool=pool,
            tree=self.tree.copy(),
            registry=self.registry.copy(),
            in_flight=self.in_flight.copy(),
            provenance=self.provenance.copy(),
        )


def next_step(cache: ContentCache, donate: bool) -> ContentCache:
    """The cache that a step changes in place, its clock one further: ``cache`` itself, consumed, or a copy."""
    if not donate:
        cache = cache.copy()
    cache.tree.clock[...] = cache.clock + 1
    return dataclasses.replace(cache, clock=cache.clock + 1)


def new_cache(config: CacheConfig, row_format: Any = None) -> ContentCache:
    """An empty cache; without ``row_format`` it plans and keeps the tree, but holds no rows.

    Raises:
      ValueError: if the device has no room for its pages.
    """
    pool = None
    if row_format is not None:
        try:
            pool = new_pool(row_format, config.num_pages, config.page_size, config.dtype, dependence=config.dependence)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(
                f"num_pages={config.num_pages} pages of {config.page_size} rows do not fit into the device's memory; "
                "lower num_pages, or choose a smaller dtype"
            ) from error
    return ContentCache(
        pool=pool,
        tree=page_tree.new_page_tree(config.num_pages, config.page_size),
        registry=registry.new_registry(
            config.num_pages, config.page_size, config.chunking.tokens_per_anchor, config.chunking.mean_tokens
        ),
        in_flight=np.zeros(config.num_pages, np.int32),
        clock=0,
        namespaces=(),
        config=config,
    )


def alive_or_empty(cache: ContentCache, model: Any) -> ContentCache:
    """The cache, or an empty one of its config where a step that was interrupted has taken it over and left none."""
    try:
        cache.require_alive()
    except ConsumedError:
        return new_cache(cache.config, None if model is None else model.row_format)
    return cache


def open_namespace(cache: ContentCache, key: bytes) -> tuple[ContentCache, int]:
    """The index of a namespace key, added if it is new."""
    if key in cache.namespaces:
        return cache, cache.namespaces.index(key)
    return dataclasses.replace(cache, namespaces=(*cache.namespaces, key)), len(cache.namespaces)
