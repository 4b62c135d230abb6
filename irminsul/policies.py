"""What a policy reuses, rotates and recomputes. All of them run through the same plan, prefill and engine.

==================  ==============================================================================================
full                nothing is reused or kept; the reference every other policy is compared with
prefix              exact prefixes at token granularity (SGLang's RadixAttention, arXiv 2312.07104)
paged_prefix        exact prefixes in whole blocks of 16 tokens (vLLM's automatic prefix caching)
naive               shifted rows served as they were stored, keys not rotated (the failure the paper starts from)
irminsul            exact prefixes, then shifted rows with delta-rotated keys (arXiv 2605.05696)
epic                irminsul, the first 32 tokens of every reused run recomputed (EPIC, arXiv 2410.15332)
cacheblend          irminsul, 15 % of the reused tokens recomputed: those whose rows at the second layer deviate most
                    (CacheBlend, arXiv 2405.16444)
irminsul+repair     irminsul, up to 15 % of the reused tokens recomputed: those that depend most on another left
                    context
irminsul+question   the same, of those the ones that the end of the prompt attends to (``question.py``)
==================  ==============================================================================================

``epic:64``, ``cacheblend:0.3`` and ``irminsul+repair:0.05`` name the same with another budget.
"""

import dataclasses
from typing import Any, Literal, get_args, get_origin


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
      min_reuse: shifted spans shorter than this are computed. Matches that touch are one span, as are those that touch
        the exact prefix with it: what an edit cut apart is still served. Serving a span costs as much as computing 3.7
        tokens (DeepSeek-V2-Lite, one H200, ``docs/results/latency_h200``); 64 is the run that anchors are sure to find.
      sink_tokens: shifted hits neither fill nor use positions below this; they may hold attention sinks.
      register: keep the rows of this request for later ones.
      provenance: what shifted rows may have been computed behind. ``exact``: none are served, so answers are those of
        full prefill, bit for bit. ``same_namespace``: anything that their namespace, or one read along with it, has
        served. ``isolated``: the canonical sink alone (``sources.py``), never anybody's prompt.
      sink: tokens of that sink, best an ordinary text; by default BOS and others, ``sink_tokens`` in all
        (``sources.canonical_sink``).
      repair: which tokens of shifted spans are recomputed (``repair.py``): the ``leading`` ones of each run, those of
        largest ``deviation``, those of largest ``dependence``, or those of largest dependence times what the
        ``question`` attends to.
      repair_tokens: how many of each run, for ``leading``.
      repair_fraction: how many of all shifted tokens at most, for the others.
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
    provenance: Literal["exact", "same_namespace", "isolated"] = "same_namespace"
    sink: tuple[int, ...] = ()
    repair: Literal["none", "leading", "deviation", "dependence", "question"] = "none"
    repair_tokens: int = 0
    repair_fraction: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in choices:
                raise ValueError(f"{field.name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}")
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
        if 0 < len(self.sink) < self.sink_tokens:
            raise ValueError(f"sink has {len(self.sink)} tokens; give sink_tokens={self.sink_tokens} or more, or none")
        if self.repair_tokens < 0 or not 0 <= self.repair_fraction <= 1:
            raise ValueError(
                f"repair_tokens={self.repair_tokens} must not be negative and repair_fraction={self.repair_fraction} "
                "be between 0 and 1"
            )


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("full", exact=False, shifted="ignore", register=False),
        Policy("prefix", bitwise=False, shifted="refuse"),
        Policy("paged_prefix", exact_granularity=16, bitwise=False, shifted="refuse"),
        Policy("naive", rotate=False),
        Policy("irminsul"),
        Policy("epic", repair="leading", repair_tokens=32),
        Policy("cacheblend", repair="deviation", repair_fraction=0.15),
        Policy("irminsul+repair", repair="dependence", repair_fraction=0.15),
        Policy("irminsul+question", repair="question", repair_fraction=0.15),
    )
}


def looked_for(policy: Policy) -> Policy:
    """The policy as far as rows of ordinary prompts go: where its provenance keeps it from serving shifted ones, they
    are refused, and the plan says where they were."""
    if policy.provenance == "same_namespace" or policy.shifted != "serve":
        return policy
    return dataclasses.replace(policy, shifted="refuse")


def get_policy(policy: str | Policy, **overrides: Any) -> Policy:
    """A policy by name, or by name and budget (``epic:64``), with fields overridden.

    Raises:
      ValueError: for an unknown name, naming the known ones, or a budget that is none or that the policy does not take.
    """
    if isinstance(policy, str):
        name, _, budget = policy.partition(":")
        if name not in POLICIES:
            raise ValueError(f"policy={policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        known = POLICIES[name]
        policy = _with_budget(known, budget) if budget else known
    if not isinstance(policy, Policy):
        raise ValueError(f"policy={policy!r} is neither a Policy nor a name; choose one of {', '.join(POLICIES)}")
    return dataclasses.replace(policy, **overrides)


def _with_budget(policy: Policy, budget: str) -> Policy:
    name = f"{policy.name}:{budget}"
    try:
        if policy.repair == "leading":
            return dataclasses.replace(policy, name=name, repair_tokens=int(budget))
        if policy.repair != "none":
            return dataclasses.replace(policy, name=name, repair_fraction=float(budget))
    except ValueError as error:
        raise ValueError(f"policy={name!r} has no valid budget: {error}") from error
    raise ValueError(f"policy={name!r} takes no budget; use {policy.name!r}")
