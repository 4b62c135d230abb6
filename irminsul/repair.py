"""Recomputing chosen tokens inside reused spans, and how policies choose them.

A shifted row is free of position and not of context: it holds what the model took from another left context. A policy
may recompute some of the tokens of a reused span behind the context they now stand in.

=============  ====================================================================================================
leading        the first tokens of every reused run, ``repair_tokens`` of them (EPIC's link tokens, arXiv 2410.15332)
deviation      a fraction of the reused tokens, those whose rows at the second layer differ most from fresh ones
               (CacheBlend, arXiv 2405.16444; ``deviation.py``)
dependence     a fraction of the reused tokens, those whose attention went furthest out of the run when they were
               computed (``dependence.py``); none whose whole left context is the one they were computed behind
question       the same, dependence counting as much as what the end of the prompt attends to (``question.py``)
=============  ====================================================================================================

Repaired rows are written into a copy of their page that belongs to the request alone and is given back when it ends:
the stored rows stay what they are. Their keys are stored for the position the page says they stand at, so the copy
keeps the one distance of its entry and the page table grows by nothing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from irminsul import page_tree
from irminsul.blocks import Block
from irminsul.cache import ContentCache
from irminsul.dependence import dependence_at
from irminsul.deviation import second_layer_deviation
from irminsul.page_tree import NONE, ORPHAN, PageTree
from irminsul.placement import Placement, fresh_name
from irminsul.plan import REPAIR, ReusePlan
from irminsul.policies import Policy
from irminsul.question import question_attention
from irminsul.shifted_rows import ShiftedRows, same_context, shifted_rows

UNSEEN = 0.3


def choose_repairs(
    policy: Policy,
    offset: Int[np.ndarray, " n"],
    score: Float[np.ndarray, " n"] | None = None,
) -> Bool[np.ndarray, " n"]:
    """Which of ``n`` reused tokens to recompute.

    Args:
      policy: says how, and how many.
      offset: of each token in its run, for ``leading``.
      score: of each token, for the other choices; tokens that score 0 are not recomputed, whatever the budget.
    """
    if policy.repair == "leading":
        return offset < policy.repair_tokens
    assert score is not None
    budget = int(policy.repair_fraction * len(offset))
    chosen = np.zeros(len(offset), bool)
    chosen[np.argsort(-score, kind="stable")[:budget]] = True
    return chosen & (score > 0)


def with_repairs(
    model: Any, cache: ContentCache, plan: ReusePlan, policy: Policy, blocks: tuple[Block, ...]
) -> ReusePlan:
    """The plan with the tokens that ``policy`` recomputes inside its shifted spans in the bin ``repair``.

    Raises:
      ValueError: if the policy chooses by what only a model or a cache that keeps dependence can tell.
    """
    if policy.repair == "none":
        return plan
    rows = shifted_rows(cache.tree, plan)
    if not len(rows):
        return plan
    score = None
    if policy.repair in ("dependence", "question"):
        score = dependence_at(_profiles(cache, policy, rows), rows.offset)
        if policy.repair == "question":
            score *= attention_counts(question_attention(model, cache, plan, rows.position))
        score[same_context(cache.provenance, cache.tree, rows, plan.content.tokens)] = 0
    elif policy.repair == "deviation":
        _require_pool(cache, policy)
        score = second_layer_deviation(model, cache, plan.content.tokens, rows, blocks)
    bins = plan.bin_of_token.copy()
    bins[rows.position[choose_repairs(policy, rows.offset, score)]] = REPAIR
    return dataclasses.replace(plan, bin_of_token=bins)


def attention_counts(attention: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """What ``question_attention`` counts in a score: a row's part of the mean, and ``UNSEEN`` of that for every row,
    since what is generated attends to more than the question does."""
    return attention / max(float(attention.mean()), 1e-12) + UNSEEN


def _require_pool(cache: ContentCache, policy: Policy) -> None:
    if cache.pool is None:
        raise ValueError(
            f"policy={policy.name!r} chooses what to recompute by {policy.repair}, and a cache without a pool (plan "
            "only) does not know it; serve a model, or use repair='leading'"
        )


def _profiles(cache: ContentCache, policy: Policy, rows: ShiftedRows) -> Float[np.ndarray, "n K"]:
    _require_pool(cache, policy)
    if cache.pool is None or cache.pool.dependence is None:
        raise ValueError(
            f"policy={policy.name!r} repairs by dependence, which this cache does not keep; create it with "
            "dependence=True"
        )
    place = np.zeros((2, cache.config.max_prompt_tokens), np.int32)
    place[:, : len(rows)] = rows.page, rows.row
    return np.asarray(_read_profiles(cache.pool.dependence, *jax.device_put((place[0], place[1]))))[: len(rows)]


@jax.jit
def _read_profiles(
    dependence: Float[Array, "K N G"], page: Int[Array, " P"], row: Int[Array, " P"]
) -> Float[Array, "P K"]:
    return dependence[:, page, row].T.astype(jnp.float32)


def privatise(placement: Placement, plan: ReusePlan) -> Placement:
    """The placement with repaired tokens among those to compute, in private copies of their pages.

    Copies are named after the fresh pages; ``placement.private`` lists the pages they are made of.
    """
    repaired = np.flatnonzero(plan.bin_of_token == REPAIR).astype(np.int32)
    if not len(repaired):
        return placement
    entries = placement.entries.copy()
    target = entries[:, 3]
    entry = np.searchsorted(target, repaired, side="right") - 1
    touched = np.unique(entry)
    private = entries[touched, 0].copy()
    entries[touched, 0] = [fresh_name(len(placement.fresh) + index) for index in range(len(touched))]
    into = repaired - target[entry]
    positions = np.concatenate([placement.positions, repaired])
    order = np.argsort(positions, kind="stable")

    def merged(others: np.ndarray, mine: np.ndarray) -> np.ndarray:
        return np.concatenate([others, mine])[order].astype(np.int32)

    return dataclasses.replace(
        placement,
        positions=positions[order],
        write_page=merged(placement.write_page, entries[entry, 0]),
        write_row=merged(placement.write_row, entries[entry, 1] + into),
        write_position=merged(placement.write_position, entries[entry, 4] + into),
        entries=entries,
        private=private,
    )


def lend(tree: PageTree, pages: Int32[np.ndarray, " K"], namespace: int) -> None:
    """Hands ``pages`` to a request for as long as it runs, in place: no walk and no hint ever leads to them."""
    for page in pages.tolist():
        tree.tokens[page] = NONE
        tree.fill[page] = tree.base_position[page] = 0
        tree.namespace[page] = namespace
        tree.pure[page] = tree.decoded[page] = False
        page_tree.attach(tree, page, ORPHAN, 0)
