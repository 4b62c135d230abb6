"""The ledger of the churn study: it finds nothing in a sound cache, and every defect that is put into one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments import churn
from experiments.churn_faults import colliding_pairs, constant_hash, weak_hash
from experiments.churn_ledger import FORGOTTEN, Archived
from experiments.churn_session import Churn
from experiments.configs.churn import get_config
from experiments.errors import InputError
from irminsul import plan
from irminsul.cache_key import request_key
from irminsul.content import read_content
from irminsul.page_tree import FREE, walk_left

PAGES = 97
WARM_UP = 12


@pytest.fixture
def churned(tmp_path):
    """A worker after some operations, with pages of several tenants and nothing in flight."""
    worker = Churn(3, PAGES, "base")
    for _ in range(WARM_UP):
        worker.step()
    worker.close()
    assert not worker.ledger.violations, worker.ledger.notes
    return worker


def held_rows(worker) -> np.ndarray:
    tree = worker.cache.tree
    return np.argwhere((tree.namespace != FREE)[:, None] & (np.arange(tree.page_size) < tree.fill[:, None]))


def change_bits(worker, page, row):
    pool = worker.cache.pool
    latent = np.array(pool.latent_pages)
    latent.view(np.uint32)[0, page, row, 0] ^= 1
    worker.cache = dataclasses.replace(worker.cache, pool=dataclasses.replace(pool, latent_pages=jnp.asarray(latent)))


def change_token(worker, page, row):
    worker.cache.tree.tokens[page, row] ^= 1


def move(worker, page, row):
    worker.cache.tree.base_position[page] += 1


def give_to_another(worker, page, row):
    tree = worker.cache.tree
    others = np.unique(tree.namespace[(tree.namespace != FREE) & (tree.namespace != tree.namespace[page])])
    tree.namespace[page] = others[0]


def never_return(worker, page, row):
    worker.cache.in_flight[page] += 1


def call_pure(worker, page, row):
    tree = worker.cache.tree
    page = np.flatnonzero((tree.namespace != FREE) & ~tree.pure.any(axis=1) & worker.ledger.bitwise)[0]
    tree.pure[page] = True


def own_without_rows(worker, page, row):
    worker.ledger.free(np.array([page]))


DEFECTS = {
    change_bits: "wrong",
    change_token: "wrong",
    move: "wrong",
    give_to_another: "leaked",
    never_return: "lost",
    call_pure: "wrong",
    own_without_rows: "lost",
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_an_audit_finds_what_is_not_as_it_was_written(churned, defect):
    churned.ledger.audit(churned.cache)
    assert churned.ledger.violations == 0
    page, row = held_rows(churned)[0].tolist()
    defect(churned, page, row)
    churned.ledger.audit(churned.cache)
    assert churned.ledger.counts[DEFECTS[defect]] > 0, churned.ledger.notes


def test_a_secret_that_is_kept_or_comes_back_is_found(churned):
    bit = 1 << next(bit for bit in range(63) if churned.ledger.knowing(churned.cache, 1 << bit))
    assert churned.ledger.knowing(churned.cache, 1 << 62) == 0
    churned.ledger.forget(churned.cache, bit)
    assert churned.ledger.counts["leaked"] > 0
    assert churned.ledger.knowing(churned.cache, bit) == 0


@pytest.mark.parametrize(
    ("histories", "found"),
    [("pure known", {"leaked"}), ("impure", {"wrong"}), ("impure, pure", set()), ("known, pure", set())],
    ids=["forgotten", "impure", "pure once", "known once"],
)
def test_a_page_from_a_tier_may_have_any_history_of_an_equal_one(churned, histories, found):
    """Of equal pages a tier gives back either; it must be one that says of itself what this one says."""
    ledger, tree = churned.ledger, churned.cache.tree
    page = next(page for page, row in held_rows(churned).tolist() if ledger.pure[page, 0] and ledger.bitwise[page])
    fill, before = int(tree.fill[page]), tree.copy()
    before.namespace[page] = FREE
    tree.pure[page, :fill] = True
    name = (ledger.owner[page], int(tree.base_position[page]), tree.tokens[page, :fill].tobytes())
    ledger.archive[name] = [
        Archived(
            ledger.rows[page, :fill].copy(),
            np.full(fill, "impure" not in history),
            np.full((fill, 2), FORGOTTEN if "known" in history else 0, np.uint64),
            True,
        )
        for history in histories.split(", ")
    ]
    ledger.loaded(before, churned.cache)
    ledger.audit(churned.cache)
    assert {kind for kind in ("wrong", "leaked", "lost") if ledger.counts[kind]} == found, ledger.notes


def believing(tree, prompt, end, page, row_end, owners, *, floor=0, pure=False):
    """``walk_left`` that takes whatever a hint leads to for the prompt."""
    spelled, position, at = prompt.copy(), end, (page, row_end)
    while position > floor and at[0] >= 0:
        count = min(at[1], position - floor)
        spelled[position - count : position] = tree.tokens[at[0], at[1] - count : at[1]]
        position, at = position - count, (int(tree.parent[at[0]]), int(tree.parent_end[at[0]]))
    return walk_left(tree, spelled, end, page, row_end, owners, floor=floor, pure=pure)


@pytest.mark.parametrize("compared", [True, False])
def test_rows_served_on_the_word_of_a_fingerprint_are_found(churned, monkeypatch, compared):
    """Every fingerprint the same: harmless where tokens are compared, and seen where they are not."""
    if not compared:
        monkeypatch.setattr(plan, "walk_left", believing)
    for operation in range(3):
        rng = np.random.default_rng(operation)
        churned.serve(rng, tenant=0, adapter="", hash_function=constant_hash, policy=churned.policies[0])
    assert churned.counts["collisions_injected"] > 0
    assert (churned.ledger.counts["wrong"] == 0) == compared


def test_searched_collisions_meet_in_the_cache(churned):
    """Two texts with one fingerprint under the weakened hash, one looked up behind the other."""
    before = churned.counts["collisions_injected"]
    for operation in range(3):
        churned.collide(np.random.default_rng(operation))
    assert churned.counts["collisions_injected"] > before
    assert churned.ledger.violations == 0
    key = request_key(churned.cache, churned.model, "tenant 0", "", True)
    chunking = churned.config.chunking
    one, other = colliding_pairs(np.random.default_rng(0), key, chunking, churned.model.vocab_size)[0]
    names = [read_content(text, chunking, key, weak_hash).anchor_fingerprints[-1] for text in (one, other)]
    strong = [read_content(text, chunking, key).anchor_fingerprints[-1] for text in (one, other)]
    assert names[0] == names[1]
    assert strong[0] != strong[1]


def quick_config(**changes) -> ConfigDict:
    config = get_config()
    config.update({"operations": 24, "workers": 1, "leg": 8, "num_pages": PAGES} | changes)
    return config


def test_a_run_says_what_it_did_and_goes_on_where_it_stopped(tmp_path):
    whole = churn.run(quick_config(), tmp_path / "whole")
    assert tuple(whole["summary"]) == churn.SUMMARY
    assert whole["summary"]["operations"] == 24
    assert whole["summary"]["wrong_rows"] == whole["summary"]["leaked_rows"] == whole["summary"]["lost_pages"] == 0
    assert min(whole["summary"][name] for name in ("exact_hits", "shifted_hits", "evictions")) > 0
    part = churn.run(quick_config(operations=8), tmp_path / "parts")
    assert part["summary"]["operations"] == 8
    assert churn.run(quick_config(), tmp_path / "parts")["rows"] == whole["rows"]


def test_a_crash_is_reported_and_stops_its_worker_alone(tmp_path, monkeypatch):
    step = churn.Churn.step

    def fragile(self):
        if self.operation == 3:
            raise RuntimeError("out of luck")
        step(self)

    monkeypatch.setattr(churn.Churn, "step", fragile)
    result = churn.run(quick_config(), tmp_path)
    assert result["rows"][0]["crashes"] == 1
    assert "1 crashes" in result["title"]
    assert "operation 3" in result["rows"][0]["notes"][-1]


@pytest.mark.parametrize(
    ("changes", "named"), [({"operations": 0}, "operations"), ({"num_pages": 3}, "num_pages"), ({"leg": 0}, "leg")]
)
def test_settings_that_cannot_be_followed_are_named(tmp_path, changes, named):
    with pytest.raises(InputError, match=named):
        churn.run(quick_config(**changes), tmp_path)


def test_checkpoints_of_other_settings_are_refused(tmp_path):
    churn.run(quick_config(operations=1), tmp_path)
    with pytest.raises(InputError, match="checkpoints"):
        churn.run(quick_config(operations=1, seed=9), tmp_path)
