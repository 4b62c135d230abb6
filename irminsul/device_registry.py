"""The hint tables inside ``jax.jit``: ``registry.lookup`` and ``registry.insert`` with the same result."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Int32

from irminsul.device_cache import DeviceHintTable, DevicePageTree
from irminsul.registry import SAME, STALE, UNUSED, WAYS, Hints
from pallas_kernels.gear_hash.uint64 import UInt64


def _stored_keys(keys: UInt64) -> UInt64:
    nameless = (keys.high == 0) & (keys.low == 0)
    return UInt64(keys.high, jnp.where(nameless, jnp.uint32(1), keys.low))


def _bucket(table: DeviceHintTable, keys: UInt64) -> Int32[Array, " n"]:
    return (keys.low & jnp.uint32(table.page.shape[0] - 1)).astype(jnp.int32)


def _same(table: DeviceHintTable, bucket: Int32[Array, " n"], keys: UInt64) -> Bool[Array, "n 8"]:
    return (table.key.high[bucket] == keys.high[:, None]) & (table.key.low[bucket] == keys.low[:, None])


def lookup(table: DeviceHintTable, tree: DevicePageTree, keys: UInt64) -> Hints:
    """Looks up ``n`` fingerprints, one bucket each."""
    keys = _stored_keys(keys)
    bucket = _bucket(table, keys)
    same = _same(table, bucket, keys)
    found = jnp.any(same, axis=1)
    # Besides fingerprints, only the one slot that holds the same is read, and nothing where none does.
    slot = jnp.where(found, bucket * WAYS + jnp.argmax(same, axis=1).astype(jnp.int32), 0)
    page, row_end, serial = (field.reshape(-1)[slot] * found for field in (table.page, table.row_end, table.serial))
    current = tree.serial[page] == serial
    return Hints(found & current, found & ~current & (serial >= 0), page, row_end)


def insert(
    table: DeviceHintTable,
    tree: DevicePageTree,
    keys: UInt64,
    valid: Bool[Array, " n"],
    page: Int32[Array, " n"],
    row_end: Int32[Array, " n"],
    clock: Int[Array, ""],
) -> DeviceHintTable:
    """Inserts the ``valid`` ones of ``n`` hints, in order; of equal fingerprints only the last.

    One hint a bucket and round, so that a round is one vectorised update; hashes make rounds few.
    """
    keys = _stored_keys(keys)
    bucket = _bucket(table, keys)
    rank = _rank_in_bucket(bucket, valid & _last_of_equals(keys, valid))

    def insert_round(state: tuple[Int32[Array, ""], DeviceHintTable]) -> tuple[Int32[Array, ""], DeviceHintTable]:
        turn, table = state
        stale = tree.serial[table.page[bucket]] != table.serial[bucket]
        preference = table.age[bucket] + jnp.where(stale, STALE, 0)
        preference = jnp.where(table.serial[bucket] < 0, UNUSED, preference)
        preference = jnp.where(_same(table, bucket, keys), SAME, preference)
        slot = jnp.argmin(preference, axis=1)
        at = (jnp.where(rank == turn, bucket, table.page.shape[0]), slot)  # out of range: dropped

        def put(array: Array, values: Array) -> Array:
            return array.at[at].set(values, mode="drop")

        return turn + 1, DeviceHintTable(
            key=UInt64(put(table.key.high, keys.high), put(table.key.low, keys.low)),
            page=put(table.page, page),
            row_end=put(table.row_end, row_end),
            serial=put(table.serial, tree.serial[page]),
            age=put(table.age, clock),
        )

    rounds = jnp.max(rank) + 1
    return lax.while_loop(lambda state: state[0] < rounds, insert_round, (jnp.int32(0), table))[1]


def _last_of_equals(keys: UInt64, valid: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Whether no later valid fingerprint equals this one."""
    index = jnp.arange(valid.shape[0], dtype=jnp.int32)
    invalid, high, low, order = lax.sort((~valid, keys.high, keys.low, index), num_keys=4)
    repeated = (high[1:] == high[:-1]) & (low[1:] == low[:-1]) & (invalid[1:] == invalid[:-1])
    return jnp.zeros_like(valid).at[order].set(~jnp.append(repeated, False))


def _rank_in_bucket(bucket: Int32[Array, " n"], kept: Bool[Array, " n"]) -> Int32[Array, " n"]:
    """How many kept hints of the same bucket come before each kept one; -1 for the others."""
    index = jnp.arange(bucket.shape[0], dtype=jnp.int32)
    dropped, grouped, order = lax.sort((~kept, bucket, index), num_keys=3)
    new_group = jnp.concatenate([jnp.ones(1, bool), grouped[1:] != grouped[:-1]])
    rank = index - lax.cummax(jnp.where(new_group, index, 0))
    return jnp.zeros_like(bucket).at[order].set(jnp.where(dropped, -1, rank))
