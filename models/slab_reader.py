"""Pieces of mapped tensors read into memory that is used again and again, past the page cache unless they are in it.

A file much larger than memory is of no use to the page cache, and filling that costs more than the disk does: pages are
found, cleared, mapped and copied once more. What a program before has left there is cheaper still, so it is taken.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.safetensors_reader import CheckpointError, Stored

SLAB_BYTES = 8 * 2**20  # what waits to be sent is copied once more, into pinned memory that grows in powers of two
BLOCK = 4096  # what reads past the page cache begin and end at, in files and in memory


def slabs(value: np.ndarray, order: tuple[int, ...], together: int = 1) -> Iterator[tuple[list[int], np.ndarray]]:
    """Pieces of ``value`` of about ``SLAB_BYTES`` at most along the axis that the file has outermost (``order[0]``),
    each with its start along every axis of ``value``, a multiple of ``together`` along that one. They are alike where
    that takes no more than twice as many: each shape takes a program."""
    start = [0] * value.ndim
    if not value.ndim:
        yield start, value
        return
    outer = order[0]
    length = value.shape[outer]
    fewest = min(length, -(-value.nbytes // SLAB_BYTES)) or 1
    even = (length // count for count in range(fewest, 2 * fewest + 1) if length % count == 0)
    step = next((rows for rows in even if rows % together == 0 or rows == length), 0)
    step = step or -(-length // fewest // together) * together
    for begin in range(0, length, step):
        start[outer] = begin
        cut = tuple(slice(begin, begin + step) if axis == outer else slice(None) for axis in range(value.ndim))
        yield list(start), value[cut]


class Maps:
    """Files mapped once each: a map a tensor takes longer to make than to read."""

    def __init__(self) -> None:
        self._maps: dict[Path, np.ndarray] = {}

    def array(self, stored: Stored) -> np.ndarray:
        """A tensor as it lies in its file, mapped; read otherwise."""
        if stored.place is None:
            return np.asarray(stored.read())
        path, begin = stored.place
        if path not in self._maps:
            self._maps[path] = np.asarray(np.memmap(path, np.uint8, "r"))
        return self._maps[path][begin : begin + stored.stored_bytes].view(stored.dtype).reshape(stored.shape)


class SlabReader:
    """Reads one slab at a time into memory of its own; a thread has one, and is done with a slab before the next."""

    def __init__(self) -> None:
        self._memory = aligned(SLAB_BYTES + 2 * BLOCK)
        self._files: dict[str, int | None] = {}

    def read(self, slab: np.ndarray) -> np.ndarray:
        """``slab`` in C order; of a file, in this reader's memory, until the next is read.

        Raises:
          CheckpointError: if the file ends within the slab.
        """
        file = _mapped_file(slab)
        if file is None or not slab.nbytes:
            return np.ascontiguousarray(slab)
        if self._memory.size < slab.nbytes + 2 * BLOCK:
            self._memory = aligned(slab.nbytes + 2 * BLOCK)
        begin = file.offset + slab.ctypes.data - file.ctypes.data
        if slab.flags.c_contiguous and not _is_cached(slab):
            name, skipped = str(file.filename), begin % BLOCK
            if name not in self._files:
                self._files[name] = open_directly(name)
            opened = self._files[name]
            if opened is not None and read_directly(opened, self._memory, begin - skipped, skipped + slab.nbytes):
                return self._memory[skipped : skipped + slab.nbytes].view(slab.dtype).reshape(slab.shape)
        copied = self._memory[: slab.nbytes].view(slab.dtype).reshape(slab.shape)
        np.copyto(copied, slab)
        let_go(slab)
        return copied

    def close(self) -> None:
        """Closes the files that it read."""
        for file in self._files.values():
            if file is not None:
                os.close(file)
        self._files.clear()


def let_go(slab: np.ndarray) -> None:
    """Takes the pages of a slab that is mapped from a file out of this process; read again they come back."""
    file = _mapped_file(slab)
    if file is None or not slab.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
        return
    mapped = file.base
    assert isinstance(mapped, mmap.mmap)
    first = np.frombuffer(mapped, np.uint8).ctypes.data
    begin, end = (address - first for address in np.lib.array_utils.byte_bounds(slab))
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def aligned(nbytes: int) -> np.ndarray:
    """Memory that may be read into directly."""
    memory = np.empty(nbytes + BLOCK, np.uint8)
    skipped = -memory.ctypes.data % BLOCK
    return memory[skipped : skipped + nbytes]


def _mapped_file(array: np.ndarray) -> np.memmap | None:
    """The map of a whole tensor that ``array`` is a view of, if there is one."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap) and isinstance(owner.base, mmap.mmap) and owner.filename is not None:
            return owner
        owner = owner.base
    return None


def _is_cached(slab: np.ndarray) -> bool:
    """Whether the page cache holds all of a mapped slab; true where nothing can be known."""
    begin, end = np.lib.array_utils.byte_bounds(slab)
    begin -= begin % mmap.PAGESIZE
    pages = np.zeros(-(-(end - begin) // mmap.PAGESIZE), np.uint8)
    try:
        failed = _LIBRARY.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), pages.ctypes.data_as(_BYTES))
    except AttributeError:
        return True
    return bool(failed) or bool(np.all(pages & 1))


# Not released while it runs: a look at a few thousand pages is over sooner than a thread is awake again.
_LIBRARY, _BYTES = ctypes.PyDLL(None), ctypes.POINTER(ctypes.c_ubyte)


def open_directly(path: Path | str) -> int | None:
    """A file opened to be read past the page cache; none if its file system has no such way."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT) if hasattr(os, "O_DIRECT") else None
    except OSError:
        return None


def read_directly(file: int, memory: np.ndarray, begin: int, length: int) -> bool:
    """Reads bytes of a file that was opened so to the front of ``memory``; ``begin`` and ``memory`` lie on a multiple
    of ``BLOCK`` and there is room for one. False if its file system has no such way.

    Raises:
      CheckpointError: if the file ends before.
    """
    done, asked = 0, -(-length // BLOCK) * BLOCK
    while done < length:
        try:
            got = os.preadv(file, [memory[done:asked].data], begin + done)
        except OSError:
            return False
        if not got:
            raise CheckpointError(f"a file of the checkpoint ends {length - done} bytes early; download it again")
        done += got
    return True
