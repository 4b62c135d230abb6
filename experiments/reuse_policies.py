"""The policies of the accuracy study, by the names its configuration uses.

A name is one of ``irminsul.policies``, or ``NAME:BUDGET`` for those that recompute on a budget (``epic:32`` tokens a
chunk, ``cacheblend:0.15`` and ``irminsul+repair:0.15`` of the reused tokens), or one of the variants: ``exact`` and
``isolated`` serve what ``Policy.provenance`` of that name allows (``irminsul`` itself is ``same_namespace``).
``isolated-text`` and ``isolated-bos`` are ``isolated`` behind a sink of ordinary text and of BOS repeated.
``oracle:0.05`` is the bound that repair is compared with. ``-no-carve-out`` behind a name, ahead of its budget
(``epic-no-carve-out:8``), reuses rows from position 0 on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from experiments.errors import InputError
from irminsul.policies import Policy, get_policy

ORACLE = "oracle:"
NO_CARVE_OUT = "-no-carve-out"
ISOLATED_TEXT, ISOLATED_BOS = "isolated-text", "isolated-bos"
VARIANTS = {
    "exact": get_policy("irminsul", provenance="exact"),
    "isolated": get_policy("irminsul", provenance="isolated"),
}


@dataclasses.dataclass(frozen=True)
class Lane:
    """A policy under the name the study reports it by. ``oracle``: the share of the reused tokens that it recomputes
    because full prefill is known to make them most different (``oracle_repair.py``)."""

    name: str
    policy: Policy
    oracle: float = 0.0

    @property
    def isolated(self) -> bool:
        """Whether its chunks are computed behind the sink alone."""
        return self.policy.provenance == "isolated"

    @property
    def stored(self) -> tuple[bool, tuple[int, ...]]:
        """Lanes that agree in this read the same cache."""
        return self.isolated, self.policy.sink


def lane(name: str, sinks: Mapping[str, Sequence[int]] = MappingProxyType({})) -> Lane:
    """The lane of a name. ``sinks``: the tokens that those with a sink of their own compute chunks behind.

    Raises:
      InputError: if there is no such policy, or it takes no such budget.
    """
    if name in VARIANTS:
        return Lane(name, VARIANTS[name])
    if name in (ISOLATED_TEXT, ISOLATED_BOS):
        return Lane(name, get_policy("irminsul", provenance="isolated", sink=tuple(map(int, sinks.get(name, ())))))
    plain = name.replace(NO_CARVE_OUT, "")
    changes = {} if plain == name else {"sink_tokens": 0}
    try:
        if plain.startswith(ORACLE):
            return Lane(name, get_policy("irminsul", **changes), float(plain.removeprefix(ORACLE)))
        return Lane(name, get_policy(plain, **changes))
    except ValueError as error:
        raise InputError(f"policies={name}: {error}") from error
