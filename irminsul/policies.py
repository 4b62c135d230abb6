"""What a policy reuses, rotates and recomputes. All of them run through the same plan, prefill and engine.

==============  =================================================================================================
full            nothing is reused or kept; the reference every other policy is compared with
prefix          exact prefixes at token granularity (SGLang's RadixAttention, arXiv 2312.07104)
paged_prefix    exact prefixes in whole blocks of 16 tokens (vLLM's automatic prefix caching)
naive           shifted rows served as they were stored, keys not rotated (the failure the paper starts from)
irminsul        exact prefixes, then shifted rows with delta-rotated keys (arXiv 2605.05696)
==============  =================================================================================================
"""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Policy:
    """Static description of a reuse policy.

    Fields:
      exact: serve exact prefixes.
      exact_granularity: exact prefixes are cut down to a multiple of this many tokens.
      bitwise: exact means bit-identical to a cold prefill, so a response that decoding wrote is no exact hit later.
        Prefix caches in use do not ask that much: their policies turn it off, and their rows are kept apart from
        those of other policies, since elsewhere a row may stand behind shifted ones.
      shifted: ``serve`` shifted hits; ``refuse`` them but say where they were; ``ignore`` them (no lookup).
      rotate: turn shifted keys by delta (without it they keep the position they were computed at).
      discovery: find shifted spans by ``anchors`` (32-token windows sampled by content) or by whole ``chunks``.
      extension: grow a shifted hit to both sides for as long as tokens agree.
      min_reuse: shifted spans shorter than this are computed.
      sink_tokens: shifted hits neither fill nor use positions below this; they may hold attention sinks.
      register: keep the rows of this request for later ones.
    """

    name: str
    exact: bool = True
    exact_granularity: int = 1
    bitwise: bool = True
    shifted: Literal["serve", "refuse", "ignore"] = "serve"
    rotate: bool = True
    discovery: Literal["anchors", "chunks"] = "anchors"
    extension: bool = True
    min_reuse: int = 64
    sink_tokens: int = 32
    register: bool = True

    def __post_init__(self):
        if self.exact_granularity < 1:
            raise ValueError(f"exact_granularity={self.exact_granularity} must be at least 1")
        if self.shifted == "serve" and not self.bitwise:
            raise ValueError(
                "bitwise=False with shifted='serve' would call rows behind shifted ones exact; keep it True"
            )
        if self.min_reuse < 1 or self.sink_tokens < 0:
            raise ValueError(
                f"min_reuse={self.min_reuse} must be at least 1 and sink_tokens={self.sink_tokens} not negative"
            )


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("full", exact=False, shifted="ignore", register=False),
        Policy("prefix", bitwise=False, shifted="refuse"),
        Policy("paged_prefix", exact_granularity=16, bitwise=False, shifted="refuse"),
        Policy("naive", rotate=False),
        Policy("irminsul"),
    )
}


def get_policy(policy: str | Policy, **overrides: Any) -> Policy:
    """A policy by name, with fields overridden.

    Raises:
      ValueError: for an unknown name, naming the known ones.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        policy = POLICIES[policy]
    return dataclasses.replace(policy, **overrides)
