"""Requests between the steps of a batch: the one whose prompt is computed piece by piece, and those that decode."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int32

from irminsul.cache import CacheConfig
from irminsul.decode import DecodeBatch, PageTableWriter
from irminsul.placement import Placement
from irminsul.prefill import Admission, Request
from pallas_kernels.page_table import page_table_from_array


@dataclasses.dataclass
class Prefilling:
    """Request ``number``, whose prompt is being computed: the first ``computed`` of the tokens its placement names.
    With ``ahead``, a chunk of the prompt behind the sink."""

    number: int
    admission: Admission
    ahead: bool
    computed: int = 0

    @property
    def finished(self) -> bool:
        """Whether every token has been handed out."""
        return self.computed == len(self.admission.placement.positions)

    def next_piece(self, tokens: int) -> tuple[Placement, Request]:
        """The next ``tokens`` computed tokens, as a placement of their own; pages are copied ahead of the first."""
        placement, request, begin = self.admission.placement, self.admission.request, self.computed
        self.computed = min(begin + tokens, len(placement.positions))
        placement = dataclasses.replace(
            placement,
            **{
                name: getattr(placement, name)[begin : self.computed]
                for name in ("positions", "write_page", "write_row", "write_position")
            },
        )
        if begin:
            none = np.zeros(0, np.int32)
            placement = dataclasses.replace(placement, private=none)
            request = dataclasses.replace(request, fresh=(), pages=none, private=none)
        return placement, request


@dataclasses.dataclass
class Running:
    """Request ``number`` in a slot: its table, the tokens whose rows decoding wrote, and the token drawn for the next
    place, from ``logits``."""

    number: int
    request: Request
    table: PageTableWriter
    written: list[int]
    proposal: int
    logits: Float[np.ndarray, " V"]

    def answer_holds(self, run: Int32[np.ndarray, " X"]) -> bool:
        """Whether an occurrence of ``run`` ends in the answer, of which the cache hears when the request ends."""
        answer = np.array([*self.written, self.proposal], np.int32)
        text = np.concatenate([self.request.plan.content.tokens, answer])[-(len(answer) + len(run) - 1) :]
        if len(text) < len(run):
            return False
        return bool((np.lib.stride_tricks.sliding_window_view(text, len(run)) == run).all(axis=1).any())


def decode_batch(slots: Sequence[Running | None], config: CacheConfig) -> DecodeBatch:
    """The step that writes the row of each request's proposal; their tables and ``written`` grow by it."""
    count = len(slots)
    token, position, row = (np.full(count, fill, np.int32) for fill in (0, -1, 0))
    page = np.full(count, config.num_pages, np.int32)
    entries = np.zeros((count, config.table_entries, 5), np.int32)
    for slot, running in enumerate(slots):
        if running is None:
            continue
        token[slot], position[slot] = running.proposal, running.request.plan.length + len(running.written)
        page[slot], row[slot] = running.request.slots[len(running.written)]
        running.table.append(int(page[slot]), int(row[slot]), int(position[slot]))
        running.written.append(running.proposal)
        entries[slot] = running.table.entries
    fields = jax.device_put({"token": token, "position": position, "write_page": page, "write_row": row})
    return DecodeBatch(page_table=page_table_from_array(entries), **fields)
