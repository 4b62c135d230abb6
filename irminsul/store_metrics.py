"""What a store counts."""

import dataclasses
from collections import Counter


@dataclasses.dataclass
class StoreMetrics:
    """Counts since a store was opened, in pages unless said otherwise.

    Fields:
      host_hits, stored_hits: pages a prompt was given from host memory (or from what still waits to be written), and
        from the key-value store.
      misses: pages a prompt would have been given, by the reason it was not: ``missing, truncated, corrupt, foreign,
        version, format, unreadable`` (the object) or ``room`` (the pool).
      skipped: records passed over when a tenant was opened, by reason: those above, ``full`` (the catalog), or the
        field in which the owner of the page differs (``model``, ``adapter``, ``dtype``, ``rotary``, ...).
      bytes_read, bytes_written: of objects.
      written, deleted, displaced: pages written, deleted on demand, and deleted to make room.
      write_failures: pages the key-value store refused.
    """

    host_hits: int = 0
    stored_hits: int = 0
    misses: Counter[str] = dataclasses.field(default_factory=Counter)
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    written: int = 0
    deleted: int = 0
    displaced: int = 0
    write_failures: int = 0

    def miss(self, reason: str, count: int = 1) -> None:
        """Counts pages that a prompt was not given."""
        if count:
            self.misses[reason] += count

    def as_dict(self) -> dict[str, int]:
        """All counts by name; reasons as ``misses_corrupt``."""
        counts: dict[str, int] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Counter):
                counts |= {f"{field.name}_{reason}": count for reason, count in sorted(value.items())}
            else:
                counts[field.name] = value
        return counts
