"""Where stored bytes lie: a tensorstore key-value store under any URL, one writer, and host memory in front of it.

``file://`` (also ``memory://``, ``gs://``, ``s3://``; google.github.io/tensorstore/kvstore) writes each object to a
temporary file and renames it, so an object is there in full or not at all. What a single object cannot give, order
gives: rows are durable before the record that leads to them is written, and a record is gone before its rows are.

One process writes. For ``file://`` that is enforced by a lock on ``writer.lock``, which ends with the process however
it ends. Remote stores have no such lock: names are those of the content, so two writers would write equal bytes under
equal names, but a page forgotten by one could be written again by the other; let one process write.
"""

import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from irminsul.store_record import StoredObjectError

LOCK_NAME = "writer.lock"
UNFINISHED = ".__lock"  # how tensorstore's file driver ends the name of an object until it is whole


class StoreLockedError(RuntimeError):
    """Another process writes this store."""


class StoreWriteError(RuntimeError):
    """Pages could not be written to, or deleted from, the key-value store."""


# What tensorstore raises: any status a remote store may answer.
REFUSED = (OSError, ValueError, RuntimeError, KeyError)


class Backend:
    """A key-value store opened for reading, or for reading and writing."""

    def __init__(self, store: str | tensorstore.KvStore, *, write: bool):
        """Opens a URL (a folder is ``file:///path/``) or takes an open tensorstore ``KvStore``.

        Raises:
          ValueError: for a URL tensorstore does not know, or that cannot be written to.
          StoreLockedError: if ``write`` and another process writes a ``file://`` store.
        """
        if isinstance(store, str):
            store = _open(store if store.endswith("/") else f"{store}/")
        self._kv = store
        self.write_allowed = write
        self._lock: int | None = None
        spec = store.spec().to_json()
        if write and spec.get("driver") == "http":
            raise ValueError(
                f"store={store.url!r} can only be read; write to file://, gs:// or s3://, or use write=False"
            )
        if write and spec.get("driver") == "file":
            self._lock = _lock_folder(spec["path"])
            for left in Path(spec["path"]).rglob(f"*{UNFINISHED}"):
                left.unlink()

    @property
    def url(self) -> str:
        """Where objects lie."""
        return self._kv.url

    def start_read(self, key: str) -> Any:
        """Starts reading an object, for ``finish_read``."""
        future = self._kv.read(key)
        future.force()
        return future

    def finish_read(self, future: Any) -> bytes | None:
        """The object, or None where there is none.

        Raises:
          StoredObjectError: "unreadable", whatever a remote store says.
        """
        try:
            answer = future.result()
        except REFUSED as error:
            raise StoredObjectError("unreadable", f"object cannot be read: {error}") from error
        return answer.value if answer.state == "value" else None

    def start_write(self, objects: Mapping[str, bytes] | Mapping[str, bytes | None]) -> list[Any]:
        """Starts writing objects, or deleting them (None), for ``finish_write``."""
        futures = [self._kv.write(key, value) for key, value in objects.items()]
        for future in futures:
            future.force()
        return futures

    def finish_write(self, futures: Iterable[Any]) -> None:
        """Returns when all of it is durable.

        Raises:
          StoreWriteError: whatever a remote store says. Some may have been written.
        """
        try:
            for future in futures:
                future.result()
        except REFUSED as error:
            raise StoreWriteError(f"object cannot be written: {error}") from error

    def write(self, objects: Mapping[str, bytes] | Mapping[str, bytes | None]) -> None:
        """``start_write`` and ``finish_write``."""
        self.finish_write(self.start_write(objects))

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects together and returns when all are gone; missing ones are no error."""
        self.write(dict.fromkeys(keys))

    def start_list(self, prefix: str) -> Any:
        """Starts listing the keys that begin with ``prefix``, for ``finish_list``."""
        first = prefix.encode()
        future = self._kv.list(tensorstore.KvStore.KeyRange(first, first[:-1] + bytes([first[-1] + 1])))
        future.force()
        return future

    def finish_list(self, future: Any) -> list[str]:
        """The keys.

        Raises:
          StoredObjectError: "unreadable", whatever a remote store says.
        """
        try:
            return [key.decode() for key in future.result()]
        except REFUSED as error:
            raise StoredObjectError("unreadable", f"objects cannot be listed: {error}") from error

    def list(self, prefix: str) -> list[str]:
        """``start_list`` and ``finish_list``."""
        return self.finish_list(self.start_list(prefix))

    def close(self) -> None:
        """Lets another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _open(url: str) -> tensorstore.KvStore:
    try:
        return tensorstore.KvStore.open(url).result()
    except ValueError as error:
        raise ValueError(
            f"store={url!r} is no URL of a store; write file:///folder/, gs://bucket/ or s3://bucket/"
        ) from error


def _lock_folder(folder: str) -> int:
    try:
        os.makedirs(folder, exist_ok=True)
        handle = os.open(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(
            f"store folder {folder} cannot be written ({error.strerror}); name one that can, or use write=False"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreLockedError(
            f"{folder} is written by another process; end that one, name another folder, or use write=False to read"
        ) from error
    return handle


class HostTier:
    """The rows of the most recently used pages in host memory, up to ``capacity`` bytes. Safe across threads."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._pages: OrderedDict[str, Mapping[str, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, name: str) -> Mapping[str, np.ndarray] | None:
        """The rows of a page, or None."""
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
            return self._pages.get(name)

    def put(self, name: str, rows: Mapping[str, np.ndarray]) -> None:
        """Keeps the rows of a page, at the expense of those unused for longest."""
        self.drop(name)
        size = _nbytes(rows)
        if size > self.capacity:
            return
        with self._lock:
            self._pages[name] = rows
            self.nbytes += size
            while self.nbytes > self.capacity:
                _, oldest = self._pages.popitem(last=False)
                self.nbytes -= _nbytes(oldest)

    def drop(self, name: str) -> None:
        """Forgets a page."""
        with self._lock:
            rows = self._pages.pop(name, None)
            self.nbytes -= 0 if rows is None else _nbytes(rows)


def _nbytes(rows: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in rows.values())
