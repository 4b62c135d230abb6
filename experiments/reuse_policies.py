"""The policies of the accuracy study, by the names its configuration uses.

A name is one of ``irminsul.policies``, or ``NAME:BUDGET`` for those that recompute on a budget (``epic:32`` tokens a
chunk, ``cacheblend:0.15`` and ``irminsul+repair:0.15`` of the reused tokens), or one of the variants: ``irminsul-no-
carve-out`` reuses rows from position 0 on, ``exact`` and ``isolated`` serve what ``Policy.provenance`` of that name
allows (``irminsul`` itself is ``same_namespace``). ``oracle:0.05`` is the bound that repair is compared with.
"""

import dataclasses

from experiments.errors import InputError
from irminsul.policies import Policy, get_policy

ORACLE = "oracle:"
VARIANTS = {
    "irminsul-no-carve-out": get_policy("irminsul", sink_tokens=0),
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


def lane(name: str) -> Lane:
    """The lane of a name.

    Raises:
      InputError: if there is no such policy, or it takes no such budget.
    """
    if name in VARIANTS:
        return Lane(name, VARIANTS[name])
    try:
        if name.startswith(ORACLE):
            return Lane(name, get_policy("irminsul"), float(name.removeprefix(ORACLE)))
        return Lane(name, get_policy(name))
    except ValueError as error:
        raise InputError(f"policies={name}: {error}") from error
