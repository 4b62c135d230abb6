"""The policies of the accuracy study, by the names its configuration uses.

A name is one of ``irminsul.policies``, or ``NAME:BUDGET`` for those that recompute on a budget (``epic:32`` tokens a
chunk, ``cacheblend:0.15`` and ``irminsul+repair:0.15`` of the reused tokens), or one of two variants:
``irminsul-no-carve-out`` reuses rows from position 0 on, ``isolated`` reuses chunks computed behind the sink alone.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int32

from experiments.errors import InputError
from irminsul.policies import Policy, get_policy

# Positions below 32 are never reused, so a chunk behind the sink begins there.
SINK_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Lane:
    """A policy under the name the study reports it by. ``isolated``: its chunks were computed behind the sink alone."""

    name: str
    policy: Policy
    isolated: bool = False

    def sink(self, model: Any) -> Int32[np.ndarray, " K"]:
        """The tokens that stand in front of every isolated chunk: the model's first token, then the one that ends a
        turn, which carry as little content as a vocabulary has."""
        first = model.config.bos_token_id or 0
        ends = model.config.eos_token_id
        filler = ends[0] if isinstance(ends, tuple) else ends if ends is not None else first
        return np.asarray([first, *[filler] * (SINK_TOKENS - 1)], np.int32)


def lane(name: str) -> Lane:
    """The lane of a name.

    Raises:
      InputError: if there is no such policy, or it takes no such budget.
    """
    if name == "isolated":
        return Lane(name, get_policy("irminsul"), isolated=True)
    if name == "irminsul-no-carve-out":
        return Lane(name, get_policy("irminsul", sink_tokens=0))
    try:
        return Lane(name, get_policy(name))
    except ValueError as error:
        raise InputError(f"policies={name}: {error}") from error
