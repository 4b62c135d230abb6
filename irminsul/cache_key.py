"""Who may read whose rows: the key of a request, as length-prefixed fields.

Two requests share rows only if every field is equal: namespace (the tenant), model digest, adapter, cache format, mode,
context, and whether *exact* means bits. Tokens are the last field: a fingerprint is that of the tokens seeded with that
of the key. Keys are compared as bytes, so no two of them run into each other and no collision makes one out of another.
"""

import functools
from collections.abc import Collection
from typing import Any, Literal

from irminsul import fingerprint
from irminsul.blocks import Mode
from irminsul.cache import CacheConfig, ContentCache
from irminsul.cache_format import CacheFormat

type Context = Literal["private", "published", "isolated"]
"""What a namespace's rows were computed behind: prompts of the tenant itself; a context that an operator published for
others to read; or the canonical sink alone."""


def check_names(namespace: str, adapter: str, shared: tuple[str, ...]) -> None:
    """Raises ``ValueError`` for names that are none."""
    for field, name in (("namespace", namespace), ("adapter", adapter)):
        if not isinstance(name, str):
            raise ValueError(f"{field}={name!r} must be a string")
    if (
        isinstance(shared, str)
        or not isinstance(shared, Collection)
        or not all(isinstance(name, str) for name in shared)
    ):
        raise ValueError(f"shared={shared!r} must be a tuple of namespaces; write ('docs',) for one")
    for name in (namespace, adapter, *shared):
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"name {name!r} holds half of a surrogate pair, which is no text; leave it out")


def request_key(
    cache: ContentCache,
    model: Any,
    namespace: str,
    adapter: str,
    bitwise: bool = True,
    mode: Mode = "deterministic",
    context: Context = "private",
) -> bytes:
    """The key bytes of a request.

    ``mode`` is in it because the two modes write different bits, and exact hits promise theirs. A cache that only plans
    (``model`` None) writes none.
    """
    form = _format(cache.config, None if model is None else _Identified(model))
    return fingerprint.key_bytes(
        namespace, form.model, adapter, form.key, "" if model is None else mode, context, int(bitwise)
    )


def namespace_prefix(namespace: str) -> bytes:
    """With what every key of a namespace begins, and no other key."""
    return fingerprint.key_bytes(namespace)


class _Identified:
    """A model as its digest, row format and rotary table: what its rows' format depends on, comparable at no cost."""

    def __init__(self, model: Any):
        self.digest, self.row_format, self.rotary = model.digest, model.row_format, model.rotary
        arrays = id(self.rotary.coarse_cos), id(self.rotary.fine_cos)  # kept alive by ``rotary``
        self._identity = (model.digest, model.row_format, self.rotary.interleaved, *arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identified) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


@functools.lru_cache(maxsize=16)  # reading a rotary table from the device costs more than planning a prompt
def _format(config: CacheConfig, model: _Identified | None) -> CacheFormat:
    return CacheFormat.of(model, config)
