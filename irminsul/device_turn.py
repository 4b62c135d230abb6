"""One turn of a session, all of it inside ``jax.jit``: cut, fingerprint, look up, plan, compute and register.

The cache is the carry, so a session is one ``lax.scan`` in one program and the host has nothing to do between turns.
The plan, the page tree, the hints and the logits are those of ``Engine.serve``, bit for bit in deterministic mode.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Int8, Int32

from irminsul.blocks import Mode, blocks_for, cost_model
from irminsul.cache import CacheConfig
from irminsul.compute import COPY_CAPACITY, PrefillBatch, compute_blocks
from irminsul.counters import Counters, of_turn
from irminsul.device_cache import DeviceCache
from irminsul.device_commit import Allocation, allocate, claim, finish, pages_in_use
from irminsul.device_placement import DevicePlacement, fresh_capacity, page_of_token, page_table, parents, place
from irminsul.device_plan import ATTEMPTS, NO_BIN, DeviceContent, DevicePlan, plan_prompt, read_content, serving
from irminsul.device_tree import release
from irminsul.policies import Policy
from irminsul.prompt_checks import check_storage
from pallas_kernels.gear_hash.uint64 import UInt64
from pallas_kernels.page_table import PageTable


@struct.dataclass
class TurnOutput:
    """What a turn got.

    Fields:
      logits: after the prompt's last token; None without a model, NaN if refused.
      bin_of_token: index into ``plan.BINS``, -1 behind the prompt.
      bins: tokens by bin; sums to the prompt's length.
      table_entries: entries of the page table.
      refused: the turn was not served and the cache is what it was: the pool cannot hold the prompt, or the length,
        a token id or the namespace is out of range. ``prefill`` raises where this is true.
      counters: what the turn adds to the counts of a cache (``counters.py``).
      clock: of the turn, which names it as a request.
      writer, position: of a token served from a stored row, the request that computed the row, and the position it did
        so at; of the others -1 (``device_provenance``).
    """

    logits: Float[Array, " V"] | None
    bin_of_token: Int8[Array, " P"]
    bins: Int32[Array, " bins"]
    table_entries: Int32[Array, ""]
    refused: Bool[Array, ""]
    counters: Counters
    clock: Int32[Array, ""]
    writer: Int32[Array, " P"]
    position: Int32[Array, " P"]


def turn(
    model: Any,
    carry: DeviceCache,
    tokens: Int32[Array, " P"],
    length: Int[Array, ""],
    namespace: Int[Array, ""],
    *,
    config: CacheConfig,
    policy: Policy,
    mode: Mode = "deterministic",
) -> tuple[DeviceCache, TurnOutput]:
    """Serves one prompt and keeps its rows as the policy says. Pure; jit it with the carry donated.

    Args:
      model: as for ``prefill``, or None to plan and keep books only.
      tokens: the prompt at the front, ``P = config.max_prompt_tokens``.
      length: tokens of the prompt.
      namespace: index into ``carry.seeds``.

    Raises:
      ValueError: if ``tokens`` has another capacity, the mode is unknown, storage cannot serve the policy, the policy
        repairs, or a model is given and the carry holds no pool.
    """
    check_storage(config, policy)
    if policy.provenance == "isolated":
        raise ValueError(
            "provenance='isolated' computes the chunks of a prompt ahead of it, as many as it has, which a turn of "
            "fixed shape does not; serve it with Engine or Batcher"
        )
    if policy.repair != "none":
        raise ValueError(
            f"policy={policy.name!r} recomputes tokens in private copies of pages, which a turn of fixed shape has no "
            "room for; serve it with Engine or Batcher, or use repair='none'"
        )
    if tokens.shape[0] != config.max_prompt_tokens:
        raise ValueError(
            f"tokens has capacity {tokens.shape[0]}, but max_prompt_tokens={config.max_prompt_tokens}; pad to that"
        )
    valid = _valid(model, carry, tokens, length, namespace)
    length = jnp.clip(length, 1, tokens.shape[0]).astype(jnp.int32)
    owner = jnp.asarray(namespace, jnp.int32)
    tree = carry.tree

    content = read_content(tokens, length, config.chunking, UInt64(*(seeds[owner] for seeds in carry.seeds)))
    plan, placement, keep, allocation = _plan_within_pool(carry, content, owner, config, policy)
    pages, page_of = allocation.pages, page_of_token(plan, placement, allocation.pages)
    table, entries = page_table(placement, page_of, length, config.table_entries)
    served = valid & allocation.enough & (entries <= config.table_entries)
    need = jnp.where(served, placement.need, 0)

    clock = tree.clock + served.astype(jnp.int32)
    page, row = plan.trail
    writer = jnp.where(plan.reused, tree.writer[page, row], -1)
    position = jnp.where(plan.reused, tree.base_position[page] + row, -1)
    touched = jnp.where(jnp.arange(pages.shape[0]) < need, pages, tree.num_pages)  # out of range: dropped
    tree = claim(tree, allocation, placement, need, tokens, parents(tree, placement, page_of), owner)
    last_used = jnp.where(keep & served, clock, tree.last_used).at[touched].set(clock, mode="drop")
    reader = jnp.where(plan.reused & served, plan.trail.page, tree.num_pages)
    rows_served = tree.served.at[reader].add(1, mode="drop")
    tree = dataclasses.replace(tree, clock=clock, last_used=last_used, served=rows_served)
    carry = dataclasses.replace(carry, tree=tree)

    logits, kept = None, need
    if model is not None:
        if carry.pool is None:
            raise ValueError("carry holds no pool (plan only); create the cache with the model's row_format")
        batch = pack_batch(placement, tokens, page_of, pages, table, served, tree.num_pages)
        logits, _, pool = compute_blocks(
            model, carry.pool, batch, blocks=blocks_for(model, mode), cost=cost_model(model), storage=config.storage,
            keep_hidden=False,
        )  # fmt: skip
        logits = jnp.where(served, logits, jnp.nan)
        kept = jnp.where(jnp.isfinite(jnp.max(logits)), need, 0)
        carry = dataclasses.replace(carry, pool=pool)
    if policy.register:
        carry = finish(carry, plan, content, placement, pages, kept)
    else:
        kept = jnp.zeros_like(need)
    tree = lax.fori_loop(kept, need, lambda i, tree: release(tree, pages[i], jnp.bool_(True)), carry.tree)
    carry = dataclasses.replace(carry, tree=tree)
    bin_of_token = jnp.where(served, plan.bin_of_token, NO_BIN).astype(jnp.int8)
    evictions = jnp.maximum(need - allocation.free, 0)
    counts = of_turn(served, plan.bins, evictions, need, table, tree.num_pages)
    bins = jnp.where(served, plan.bins, 0)
    output = TurnOutput(logits, bin_of_token, bins, entries, ~served, counts, clock, writer, position)
    return carry, output


def _plan_within_pool(
    carry: DeviceCache, content: DeviceContent, owner: Int32[Array, ""], config: CacheConfig, policy: Policy
) -> tuple[DevicePlan, DevicePlacement, Bool[Array, " N"], Allocation]:
    """Plan, placement, the pages that must stay and those to take.

    Where what a plan reads leaves too few pages, shifted spans are refused, and then all reuse, as in ``prefill``.
    """

    def attempt(index: Int32[Array, ""]) -> tuple[DevicePlan, DevicePlacement, Bool[Array, " N"], Allocation]:
        plan = plan_prompt(
            carry.tree, carry.content, carry.chain, content, owner, policy, serving(policy, index),
            config.chunking.anchor_window, config.planned_entries,
        )  # fmt: skip
        placement = place(carry.tree, plan, content, config, policy)
        keep = pages_in_use(carry.tree, plan)
        return (
            plan,
            placement,
            keep,
            allocate(carry.tree, placement.need, keep, fresh_capacity(config, policy), config.eviction),
        )

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(attempt, jnp.int32(0)))
    return lax.while_loop(
        lambda state: (state[0] < ATTEMPTS) & ~state[1][-1].enough,
        lambda state: (state[0] + 1, attempt(state[0])),
        (jnp.int32(0), nothing),
    )[1]


def _valid(
    model: Any, carry: DeviceCache, tokens: Int32[Array, " P"], length: Int[Array, ""], namespace: Int[Array, ""]
) -> Bool[Array, ""]:
    """Whether ``prefill`` would accept the request."""
    capacity = tokens.shape[0]
    longest, largest = capacity, jnp.iinfo(jnp.int32).max - 1
    if model is not None:
        longest, largest = min(longest, model.max_position), model.vocab_size - 1
    inside = (tokens >= 0) & (tokens <= largest) | (jnp.arange(capacity) >= length)
    known = (namespace >= 0) & (namespace < carry.seeds.low.shape[0])
    return (length >= 1) & (length <= longest) & jnp.all(inside) & known


def pack_batch(
    placement: DevicePlacement,
    tokens: Int32[Array, " P"],
    page_of: Int32[Array, " P"],
    pages: Int32[Array, " F"],
    table: PageTable,
    served: Bool[Array, ""],
    num_pages: int,
) -> PrefillBatch:
    """What the compiled prefill reads; empty unless ``served``."""
    capacity = tokens.shape[0]
    positions = jnp.nonzero(placement.computed & served, size=capacity, fill_value=capacity)[0].astype(jnp.int32)
    real = positions < capacity

    def of_computed(values: Int32[Array, " P"], fill: int) -> Int32[Array, " P"]:
        return jnp.where(real, values[jnp.minimum(positions, capacity - 1)], fill)

    slots = jnp.zeros(COPY_CAPACITY, jnp.int32)
    copied = served & (placement.copied_rows > 0)
    return PrefillBatch(
        tokens=of_computed(tokens, 0),
        positions=jnp.where(real, positions, -1),
        write_page=of_computed(page_of, num_pages),
        write_row=of_computed(placement.row, 0),
        write_position=jnp.where(real, positions, 0),
        count=jnp.sum(real, dtype=jnp.int32),
        page_table=table,
        copy_source=slots.at[0].set(placement.copied_from),
        copy_target=slots.at[0].set(pages[0]),
        copy_count=copied.astype(jnp.int32),
    )


@partial(jax.jit, static_argnames=("config", "policy", "mode"), donate_argnames=("carry",))
def serve_session(
    model: Any,
    carry: DeviceCache,
    prompts: Int32[Array, "turns P"],
    lengths: Int32[Array, " turns"],
    namespaces: Int32[Array, " turns"],
    *,
    config: CacheConfig,
    policy: Policy,
    mode: Mode = "deterministic",
) -> tuple[DeviceCache, TurnOutput]:
    """Serves the turns of a session one after the other in one program, the carry in place.

    Returns the last cache, and the outputs stacked over turns.
    """

    def one(carry: DeviceCache, request: tuple[Array, ...]) -> tuple[DeviceCache, TurnOutput]:
        return turn(model, carry, *request, config=config, policy=policy, mode=mode)

    return lax.scan(one, carry, (prompts, lengths, namespaces))
