"""The identity of stored rows: what must be equal for rows that one run wrote to be read by another.

Layouts that look alike swap silently (equal byte counts, other meaning), so every field that gives a byte its meaning
is spelled out, typed and compared by name. ``digest`` stands for all of them in keys and objects; ``differences`` says
which one kept a row from being served.
"""

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from irminsul import fingerprint
from irminsul.cache import CacheConfig
from irminsul.dependence import DEPENDENCE_DTYPE, DISTANCES, MEASURE
from pallas_kernels.rotary import RotaryTable

VERSION = 2


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """A typed id of the rows of a cache.

    Fields:
      version: of the stored form.
      model: digest of the weights; empty for a cache that only plans.
      kind, num_layers, latent_width, rope_width, rope_heads: of a row (``Model.row_format``).
      index_layers, index_width, index_interleaved: of the indexer keys beside them.
      interleaved: rotary pairs ``(2f, 2f+1)``, else ``(f, f+F)``.
      rotary: digest of the frequencies, those of YaRN and of single layers included.
      dtype: of the rows.
      storage: keys rotated at their ``base`` position, or ``unrotated``.
      page_size: rows a page.
      dependence: what is kept of each token's dependence; empty for nothing.
      chunking: digest of what decides cuts and fingerprints, and with them where rows lie.
    """

    version: int
    model: str
    kind: str
    num_layers: int
    latent_width: int
    rope_width: int
    rope_heads: int
    index_layers: int
    index_width: int
    index_interleaved: bool
    interleaved: bool
    rotary: str
    dtype: str
    storage: str
    page_size: int
    dependence: str
    chunking: str

    @classmethod
    def of(cls, model: Any, config: CacheConfig) -> "CacheFormat":
        """The format of the rows that ``model`` writes into a cache of ``config``; ``model`` None: rows of nothing."""
        row: dict[str, Any] = {
            "kind": "",
            "num_layers": 0,
            "latent_width": 0,
            "rope_width": 0,
            "interleaved": False,
            "rope_heads": 0,
            "index_layers": 0,
            "index_width": 0,
            "index_interleaved": False,
        }
        if model is not None:
            row = dataclasses.asdict(model.row_format)
        return cls(
            version=VERSION,
            model="" if model is None else model.digest,
            rotary="" if model is None else rotary_digest(model.rotary),
            dtype=config.dtype,
            storage=config.storage,
            page_size=config.page_size,
            dependence=f"{np.dtype(DEPENDENCE_DTYPE).name}{list(DISTANCES)} {MEASURE}"
            if getattr(config, "dependence", False)
            else "",
            chunking=digest(repr(config.chunking).encode()),
            **row,
        )

    @property
    def key(self) -> bytes:
        """All fields as key bytes: equal exactly if the formats are."""
        return fingerprint.key_bytes(*(str(value) for value in dataclasses.astuple(self)))

    @property
    def digest(self) -> str:
        """Of the format, in hexadecimal."""
        return digest(self.key)

    def differences(self, other: "CacheFormat") -> list[str]:
        """Names of the fields in which two formats differ."""
        return [
            field.name for field in dataclasses.fields(self) if getattr(self, field.name) != getattr(other, field.name)
        ]

    def to_json(self) -> str:
        """The fields as a JSON object; ``from_json`` reads them back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CacheFormat":
        """What ``to_json`` wrote.

        Raises:
          ValueError: if the text is no such object.
        """
        fields = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != names:
            raise ValueError(f"cache format {text[:80]!r} does not have the fields {sorted(names)}")
        return cls(**fields)


def rotary_digest(table: RotaryTable) -> str:
    """Digest of the frequencies and layout of a rotary table, whatever distances it covers."""
    middle = table.coarse_cos.shape[-2] // 2
    parts = [
        np.asarray(array, "<f4").tobytes()
        for array in (
            table.coarse_cos[..., middle : middle + 2, :],
            table.coarse_sin[..., middle : middle + 2, :],
            table.fine_cos,
            table.fine_sin,
        )
    ]
    return digest(fingerprint.key_bytes(int(table.interleaved), table.width, *parts))


def digest(data: bytes) -> str:
    """BLAKE2b in 16 bytes (RFC 7693), as hexadecimal digits: unlike a fingerprint, no collision can be made."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
