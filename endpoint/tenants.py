"""Who may share rows: each API key is a tenant of its own, and rows of one never serve another."""

import dataclasses
import hashlib
import hmac
from pathlib import Path

SHOWN = 16


@dataclasses.dataclass(frozen=True)
class Tenants:
    """Keys and the namespaces they stand for. With ``names`` only those keys are let in; without, any."""

    names: dict[str, str] | None = None

    @classmethod
    def read(cls, path: str | Path) -> "Tenants":
        """From a file of lines ``NAME KEY``; lines that begin with ``#`` are comments.

        Raises:
          OSError: if it cannot be read.
          ValueError: for a line of another form, or a name or key that comes twice.
        """
        names: dict[str, str] = {}
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            words = line.split()
            if not words or line.startswith("#"):
                continue
            if len(words) != 2 or words[1] in names or words[0] in names.values():
                raise ValueError(f"line {number} is not NAME KEY with a name and a key of its own")
            names[words[1]] = words[0]
        if not names:
            raise ValueError("no key is named; give lines NAME KEY")
        return cls(names)

    def namespace(self, authorization: str | None) -> str | None:
        """The tenant of an ``Authorization`` header; None for one that is not let in.

        Without names it is made of a digest, so that no key is written to a disk tier.
        """
        kind, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if kind.lower() != "bearer" or not key:
            return None
        if self.names is None:
            return "key-" + hashlib.blake2b(key.encode(), digest_size=SHOWN).hexdigest()
        found = None
        for known, name in self.names.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(known.encode(), key.encode()):
                found = name
        return found
