"""What stored rows were computed from: the computations of a cache (``provenance``), carried to the catalog and back.

The catalog has the form of a cache, so it keeps computations in the same form, under numbers of its own; ``carry``
copies those that rows need, and those they were computed from in turn. In a store each is an object of its own, written
before the pages that name it. A page whose computation is gone was computed behind who knows what, and is forgotten
with whatever is forgotten in its tenant.
"""

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping

from irminsul.cache import ContentCache, open_namespace
from irminsul.page_tree import UNKNOWN
from irminsul.provenance import NAMESPACE, WRITER, Computation
from irminsul.store_record import StoredObjectError, pack, unpack


def carry(
    source: ContentCache, target: ContentCache, requests: Iterable[int], known: dict[int, int]
) -> tuple[ContentCache, dict[int, int]]:
    """Copies the computations of ``requests``, and all they lead back to, from one cache to another.

    Args:
      known: numbers in ``source`` to numbers in ``target``; those still in ``target`` are not copied, unless they were
        while their request went on, and have grown since. Completed.

    Returns:
      The target with its clock advanced by one a new computation, and ``known`` of those copied, sources first.
    """
    there, here = target.provenance.computations, source.provenance.computations

    def is_whole(request: int) -> bool:
        copy = there.get(known.get(request, UNKNOWN))
        return copy is not None and copy.length >= here[request].length

    needed = led_back_to(here, requests, is_whole)
    copied = {}
    for request in needed:
        computation, sources = here[request], here[request].sources.copy()
        for line in sources:
            line[WRITER] = number_in(there, known, int(line[WRITER]))
            target, line[NAMESPACE] = open_namespace(target, source.namespaces[line[NAMESPACE]])
        target, namespace = open_namespace(target, source.namespaces[computation.namespace])
        number = number_in(there, known, request)
        if number == UNKNOWN:
            target = dataclasses.replace(target, clock=target.clock + 1)
            target.tree.clock[...] = number = target.clock
        there[number] = dataclasses.replace(computation, namespace=namespace, sources=sources)
        known[request] = copied[request] = number
    return target, copied


def led_back_to(
    computations: Mapping[int, Computation], requests: Iterable[int], known: Callable[[int], bool]
) -> list[int]:
    """``requests`` and all they lead back to, oldest first, up to what is ``known``."""
    needed: set[int] = set()
    waiting = list(requests)
    while waiting:
        request = waiting.pop()
        if request in computations and request not in needed and not known(request):
            needed.add(request)
            waiting += computations[request].sources[:, WRITER].tolist()
    return [request for request in computations if request in needed]


def number_in(computations: Mapping[int, Computation], known: Mapping[int, int], request: int) -> int:
    """What ``carry`` calls a request in the target, or ``UNKNOWN``."""
    number = known.get(request, UNKNOWN)
    return number if number in computations else UNKNOWN


class StoredComputations:
    """Under which names, and with which owners, the computations of a catalog are stored.

    Every owner has its own copy of what its pages lead back to, so that no other tenant's objects are read for them.
    """

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}
        self.owners: dict[str, set[int]] = {}  # the computations stored with each, by digest
        self._name_of: dict[int, str] = {}

    def name(self, number: int) -> str:
        """The name of a computation, chosen at random on first use: its content shrinks when something is forgotten."""
        if number not in self._name_of:
            self._remember(number, secrets.token_hex(16))
        return self._name_of[number]

    def _remember(self, number: int, name: str) -> None:
        self._name_of[number], self.number_of[name] = name, number

    def add(self, catalog: ContentCache, requests: Iterable[int], owner: str) -> list[int]:
        """Counts computations, and all they lead back to, among those stored with an owner; returns the new ones."""
        held = self.owners.setdefault(owner, set())
        new = led_back_to(catalog.provenance.computations, requests, held.__contains__)
        held |= set(new)
        return new

    def drop(self, number: int) -> list[tuple[str, str]]:
        """Forgets a computation; returns the owners it is stored with, each with its name there."""
        owners = [owner for owner, held in self.owners.items() if number in held]
        for owner in owners:
            self.owners[owner].discard(number)
        name = self._name_of.pop(number, None)
        if name is not None:
            del self.number_of[name]
        return [(owner, name) for owner in owners if name is not None]

    def encode(self, catalog: ContentCache, number: int, owner: str) -> bytes:
        """The object of a computation."""
        computation = catalog.provenance.computations[number]
        writers = computation.sources[:, WRITER].tolist()
        header = {
            "owner": owner,
            "namespace": catalog.namespaces[computation.namespace].hex(),
            "fields": scalars(computation),
            "writers": [self.name(writer) if writer in catalog.provenance.computations else "" for writer in writers],
            "namespaces": [catalog.namespaces[index].hex() for index in computation.sources[:, NAMESPACE].tolist()],
        }
        return pack({"computed": computation.computed, "sources": computation.sources}, header)

    def file(
        self, catalog: ContentCache, objects: Mapping[str, bytes], owner: str, skip: Callable[[str], None]
    ) -> ContentCache:
        """Reads the computations of an owner into the catalog, sources first. ``skip`` is told why one is not."""
        read: dict[str, tuple[Computation, list[str]]] = {}
        for name, data in objects.items():
            try:
                arrays, header = unpack(data)
                if header["owner"] != owner:
                    raise StoredObjectError("foreign", f"computation {name} belongs to another owner")
                sources = arrays["sources"].reshape(-1, 5).copy()
                for line, hexadecimal in zip(sources, header["namespaces"], strict=True):  # type: ignore[call-overload]
                    catalog, line[NAMESPACE] = open_namespace(catalog, bytes.fromhex(hexadecimal))
                catalog, namespace = open_namespace(catalog, bytes.fromhex(str(header["namespace"])))
                computation = Computation(
                    namespace=namespace,
                    computed=arrays["computed"],
                    sources=sources,
                    **header["fields"],  # type: ignore[arg-type]
                )
                read[name] = computation, [str(writer) for writer in header["writers"]]  # type: ignore[attr-defined]
            except StoredObjectError as error:
                skip(error.reason)
            except (KeyError, ValueError, TypeError):
                skip("corrupt")
        for name in _sources_first({name: writers for name, (_, writers) in read.items()}):
            computation, writers = read[name]
            computation.sources[:, WRITER] = [self.number_of.get(writer, UNKNOWN) for writer in writers]
            if name not in self.number_of:
                catalog = dataclasses.replace(catalog, clock=catalog.clock + 1)
                catalog.tree.clock[...] = catalog.clock
                self._remember(catalog.clock, name)
            catalog.provenance.computations[self.number_of[name]] = computation
            self.owners.setdefault(owner, set()).add(self.number_of[name])
        return catalog


def scalars(computation: Computation) -> dict[str, int]:
    """The fields of a computation that are numbers and mean the same in every cache."""
    names = [field.name for field in dataclasses.fields(computation)]
    return {name: getattr(computation, name) for name in names if name not in ("namespace", "computed", "sources")}


def _sources_first(sources: Mapping[str, list[str]]) -> list[str]:
    """Names in an order in which each comes behind those it leads back to."""
    order: dict[str, None] = {}
    for first in sources:
        stack = [first]
        while stack:
            name = stack[-1]
            ahead = [other for other in sources[name] if other in sources and other not in order and other not in stack]
            if ahead and name not in order:
                stack.append(ahead[0])
            else:
                order[stack.pop()] = None
    return list(order)
