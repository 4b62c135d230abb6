"""A whole cache on disk, as one orbax checkpoint: pool, page tree, registry, provenance and namespaces.

Unlike the tiers, which hold pages one by one, a checkpoint is one moment of one cache. It is written beside its place
and renamed (orbax), so it is there in full or not at all.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from irminsul.cache import CacheConfig, ContentCache, new_cache
from irminsul.cache_format import CacheFormat
from irminsul.prompt_checks import check_pool
from irminsul.provenance import Computation, Provenance
from irminsul.store_provenance import scalars


class CheckpointError(ValueError):
    """A checkpoint that is no cache, or a cache of another format or size."""


def save_cache(cache: ContentCache, model: Any, folder: str | Path) -> None:
    """Writes a cache between requests; the cache stays as it is. A checkpoint that was there is replaced.

    Raises:
      ConsumedError: if the cache was taken over by a later step.
      ValueError: if requests are in flight, or its rows are not the model's.
    """
    import orbax.checkpoint as ocp  # takes seconds to import, and serving needs it not

    cache.require_alive()
    if cache.in_flight.any():
        raise ValueError(f"{int((cache.in_flight > 0).sum())} pages are in flight; complete their requests first")
    if cache.pool is not None and model is not None:
        check_pool(cache.pool, model.row_format)
    arrays = _arrays(cache)
    identity = {
        "format": CacheFormat.of(model, cache.config).to_json(),
        "namespaces": [key.hex() for key in cache.namespaces],
        "clock": cache.clock,
        "computations": [
            {"request": request, "namespace": one.namespace, "computed": len(one.computed), "sources": len(one.sources)}
            | {"fields": scalars(one)}
            for request, one in cache.provenance.computations.items()
        ],
        "arrays": {
            name: {"shape": list(array.shape), "dtype": array.dtype.name, "checksum": _checksum(array)}
            for name, array in arrays.items()
        },
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            Path(folder).absolute(),
            ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), identity=ocp.args.JsonSave(identity)),
            force=True,
        )


def load_cache(folder: str | Path, model: Any, config: CacheConfig) -> ContentCache:
    """Reads what ``save_cache`` wrote.

    Args:
      model, config: of the cache that was saved; ``model`` None for one that only plans.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      CheckpointError: if it is one of another model, format or size, or damaged.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} holds no checkpoint of a cache")
    cache = new_cache(config) if model is None else new_cache(config, model.row_format)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            identity = checkpointer.restore(folder, ocp.args.Composite(identity=ocp.args.JsonRestore()))["identity"]
            saved = CacheFormat.from_json(identity["format"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(f"{folder} holds no checkpoint of a cache: {error}") from error
        _require_equal(folder, saved.differences(CacheFormat.of(model, config)))
        template = {
            name: np.zeros(described["shape"], described["dtype"]) for name, described in identity["arrays"].items()
        }
        wanted = {name: (array.shape, array.dtype) for name, array in _arrays(cache).items()}
        _require_equal(folder, [name for name, form in wanted.items() if _form(template, name) != form])
        try:
            target = ocp.args.StandardRestore(template)
            arrays = checkpointer.restore(folder, ocp.args.Composite(arrays=target))["arrays"]
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"{folder} cannot be read in full: {error}") from error
    damaged = [name for name, array in arrays.items() if _checksum(array) != identity["arrays"][name]["checksum"]]
    if damaged:
        raise CheckpointError(
            f"{folder} is damaged: {', '.join(damaged)} do not have the checksums they were saved with"
        )
    return _rebuilt(cache, identity, arrays)


def _require_equal(folder: Path, differences: list[str]) -> None:
    if differences:
        raise CheckpointError(f"{folder} holds another cache: {', '.join(differences)} differ")


def _form(arrays: dict[str, np.ndarray], name: str) -> tuple[tuple[int, ...], np.dtype] | None:
    return (arrays[name].shape, arrays[name].dtype) if name in arrays else None


def _parts(cache: ContentCache) -> dict[str, Any]:
    return {"pool": cache.pool, "tree": cache.tree, "registry": cache.registry}


def _arrays(cache: ContentCache) -> dict[str, np.ndarray]:
    """Every array of a cache by name, on the host. Those of provenance stand one behind the other, if there are any."""
    paths = jax.tree_util.tree_leaves_with_path(_parts(cache))
    arrays = {jax.tree_util.keystr(path): np.asarray(array) for path, array in paths}
    computations = list(cache.provenance.computations.values())
    for name in ("computed", "sources"):
        joined = [getattr(one, name).reshape(-1) for one in computations]
        if sum(map(len, joined)):  # orbax writes no empty arrays
            arrays[name] = np.concatenate(joined)
    return arrays


def _rebuilt(cache: ContentCache, identity: dict[str, Any], arrays: dict[str, np.ndarray]) -> ContentCache:
    """``cache`` with everything that was saved."""

    def saved(path: Any, old: Any) -> Any:
        new = arrays[jax.tree_util.keystr(path)]
        return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else np.array(new)

    parts = jax.tree_util.tree_map_with_path(saved, _parts(cache))
    described = identity["computations"]
    empty = np.zeros(0, np.int32)
    computed = np.split(arrays.get("computed", empty), np.cumsum([one["computed"] for one in described])[:-1])
    sources = np.split(arrays.get("sources", empty), 5 * np.cumsum([one["sources"] for one in described])[:-1])
    computations = {
        one["request"]: Computation(
            namespace=one["namespace"], computed=tokens, sources=lines.reshape(-1, 5), **one["fields"]
        )
        for one, tokens, lines in zip(described, computed, sources, strict=False)
    }
    return dataclasses.replace(
        cache,
        **parts,
        clock=identity["clock"],
        namespaces=tuple(bytes.fromhex(key) for key in identity["namespaces"]),
        provenance=Provenance(computations),
    )


def _checksum(array: np.ndarray) -> str:
    return xxhash.xxh64_hexdigest(np.ascontiguousarray(array).tobytes())
