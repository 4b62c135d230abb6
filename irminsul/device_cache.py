"""The content cache on the device: what ``ContentCache`` keeps on the host, as one pytree of jnp arrays.

It goes through ``jax.jit``, ``lax.scan`` and donation like any other value, so a whole session can run inside one
program (``device_turn``). The fields are those of ``PageTree`` and ``HintTable``, fingerprints as pairs of uint32.
"""

from dataclasses import fields

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Int32

from irminsul import fingerprint
from irminsul.cache import CacheConfig, ContentCache
from irminsul.page_tree import PageTree
from irminsul.pool import LatentPool
from irminsul.provenance import Provenance
from irminsul.registry import HintTable, Registry
from pallas_kernels.gear_hash import uint64
from pallas_kernels.gear_hash.uint64 import UInt64


@struct.dataclass
class DevicePageTree:
    """``page_tree.PageTree`` as device arrays; the same fields."""

    tokens: Int32[Array, "N G"]
    fill: Int32[Array, " N"]
    base_position: Int32[Array, " N"]
    namespace: Int32[Array, " N"]
    serial: Int32[Array, " N"]
    parent: Int32[Array, " N"]
    parent_end: Int32[Array, " N"]
    first_child: Int32[Array, " N"]
    next_sibling: Int32[Array, " N"]
    previous_sibling: Int32[Array, " N"]
    last_used: Int32[Array, " N"]
    served: Int32[Array, " N"]
    pinned: Bool[Array, " N"]
    writer: Int32[Array, "N G"]
    pure: Bool[Array, "N G"]
    decoded: Bool[Array, "N G"]
    clock: Int32[Array, ""]

    @property
    def num_pages(self) -> int:
        """``N``."""
        return self.tokens.shape[0]

    @property
    def page_size(self) -> int:
        """Rows a page, ``G``."""
        return self.tokens.shape[1]


@struct.dataclass
class DeviceHintTable:
    """``registry.HintTable`` as device arrays; the same fields, the key as a pair."""

    key: UInt64
    page: Int32[Array, "K 8"]
    row_end: Int32[Array, "K 8"]
    serial: Int32[Array, "K 8"]
    age: Int32[Array, "K 8"]


@struct.dataclass
class DeviceCache:
    """The carry of a session.

    Fields:
      pool: the rows; None for a cache that only plans.
      tree, content, chain: the page tree and the two hint tables.
      seeds: of each namespace, ``[Q]``; a request names its own by index.
    """

    pool: LatentPool | None
    tree: DevicePageTree
    content: DeviceHintTable
    chain: DeviceHintTable
    seeds: UInt64


def to_device(cache: ContentCache) -> DeviceCache:
    """The cache as a carry. Open the namespaces first (``cache.open_namespace``).

    The pool is shared, not copied: donating the carry consumes ``cache``. Its host arrays are copied.

    Raises:
      ConsumedError: if a step has taken the cache over.
      ValueError: if no namespace is open, or a request is in flight.
    """
    cache.require_alive()
    if not cache.namespaces:
        raise ValueError("cache has namespaces=(); open the namespaces that requests will name before moving it")
    if cache.in_flight.any():
        raise ValueError(
            f"cache has {int((cache.in_flight > 0).sum())} pages in flight; end its requests with complete first"
        )
    seeds = np.array([fingerprint.key_seed(key) for key in cache.namespaces], np.uint64)
    return DeviceCache(
        pool=cache.pool,
        tree=_tree_to_device(cache.tree),
        content=_hint_table_to_device(cache.registry.content),
        chain=_hint_table_to_device(cache.registry.chain),
        seeds=uint64.from_numpy(seeds),
    )


def to_host(
    carry: DeviceCache, config: CacheConfig, namespaces: tuple[bytes, ...], provenance: Provenance | None = None
) -> ContentCache:
    """The carry as a cache for ``prefill`` and ``Engine``; the inverse of ``to_device``. The pool is shared.

    ``provenance`` is what is known of the requests so far (``device_provenance.session_provenance``). What others wrote
    has an unknown context, which ``forget`` takes to hold everything.
    """
    tree = PageTree(**{field.name: np.array(getattr(carry.tree, field.name)) for field in fields(PageTree)})
    hints = Registry(_hint_table_to_host(carry.content), _hint_table_to_host(carry.chain))
    in_flight = np.zeros(config.num_pages, np.int32)
    known = Provenance() if provenance is None else provenance.copy()
    return ContentCache(carry.pool, tree, hints, in_flight, int(tree.clock), namespaces, config, known)


def _tree_to_device(tree: PageTree) -> DevicePageTree:
    # A copy: the host changes its arrays in place, and jnp.asarray may share their memory.
    return DevicePageTree(**{field.name: jnp.array(getattr(tree, field.name), copy=True) for field in fields(tree)})


def _hint_table_to_device(table: HintTable) -> DeviceHintTable:
    arrays = {name: getattr(table, name) for name in ("page", "row_end", "serial", "age")}
    return DeviceHintTable(
        key=uint64.from_numpy(table.key), **{name: jnp.array(array, copy=True) for name, array in arrays.items()}
    )


def _hint_table_to_host(table: DeviceHintTable) -> HintTable:
    arrays = {name: np.array(getattr(table, name)) for name in ("page", "row_end", "serial", "age")}
    return HintTable(key=uint64.to_numpy(table.key), **arrays)
