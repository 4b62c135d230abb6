"""Tokens recomputed inside reused spans: which ones each policy takes, where their rows go, and what they are worth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from irminsul.blocks import blocks_for
from irminsul.cache import new_cache
from irminsul.decode import advance, start_decoding
from irminsul.dependence import dependence_at
from irminsul.deviation import second_layer_deviation
from irminsul.page_tree import FREE
from irminsul.plan import EXACT, REPAIR, SHIFTED
from irminsul.policies import get_policy
from irminsul.prefill import complete, prefill
from irminsul.question import question_attention
from irminsul.repair import attention_counts, choose_repairs
from irminsul.shifted_rows import same_context, shifted_rows
from models import families
from models.kv_view import DenseView
from pallas_kernels.rotary import rotate
from tests.irminsul.serving import plan_of, random_tokens, serve
from tests.irminsul.test_dependence import TINY_GQA
from tests.tolerances import assert_close

BODY = random_tokens(1, 307)
FIRST = np.concatenate([random_tokens(2, 53), BODY])
SECOND = np.concatenate([random_tokens(3, 67), BODY, random_tokens(4, 11)])


@pytest.fixture
def cache(model, config):
    """A cache that has served ``FIRST``."""
    return serve(model, new_cache(config, model.row_format), FIRST).cache


def repaired(plan) -> np.ndarray:
    return np.flatnonzero(plan.bin_of_token == REPAIR)


def score(model, cache, tokens, policy, **options) -> np.ndarray:
    """Logits and leave ``cache`` as it is."""
    return np.asarray(prefill(model, cache, tokens, policy, mode="deterministic", donate=False, **options).logits)


@pytest.mark.parametrize("policy", ["epic:600", "cacheblend:1.0", "irminsul+repair:1.0", "irminsul+question:1.0"])
def test_repairing_everything_is_full_prefill(model, cache, config, policy):
    full = serve(model, new_cache(config, model.row_format), SECOND, "full")
    blind = serve(model, cache.copy(), SECOND, "irminsul")
    served = serve(model, cache.copy(), SECOND, policy)
    assert served.bins["shifted"] == 0
    assert served.bins["repair"] == blind.bins["shifted"] > 250
    assert_close(served.logits, full.logits)
    assert_close(served.hidden[served.computed], full.hidden[served.computed])
    assert np.abs(blind.logits - full.logits).max() > 0.1


@pytest.mark.parametrize("policy", ["epic:0", "cacheblend:0", "irminsul+repair:0", "irminsul+question:0"])
def test_without_a_budget_they_are_irminsul_bit_for_bit(model, cache, policy):
    np.testing.assert_array_equal(score(model, cache, SECOND, policy), score(model, cache, SECOND, "irminsul"))


@pytest.mark.parametrize("storage", ["base", "unrotated"])
def test_a_repaired_row_is_the_row_full_prefill_computes_behind_what_is_served(model, config, storage):
    """The first repaired tokens of a run see exact rows and themselves only, so they must come out as in full prefill;
    the rows they replace differ."""
    config = dataclasses.replace(config, storage=storage)
    cache = serve(model, new_cache(config, model.row_format), FIRST).cache
    full = serve(model, new_cache(config, model.row_format), SECOND, "full")
    served = serve(model, cache, SECOND, "epic:40")
    tokens = repaired(served.plan)
    assert len(tokens) == 40
    assert (np.diff(tokens) == 1).all()
    assert_close(served.hidden[tokens], full.hidden[tokens])
    assert not np.allclose(served.logits, full.logits, atol=1e-3)


def test_repair_takes_no_entry_of_the_page_table_and_gives_its_pages_back(model, cache):
    stored = np.asarray(cache.pool.latent_pages).copy(), np.asarray(cache.pool.rope_pages).copy()
    held = cache.tree.namespace != FREE
    free = int((cache.tree.namespace == FREE).sum())
    blind = prefill(model, cache, SECOND, "irminsul", mode="deterministic", donate=False)
    result = prefill(model, cache, SECOND, "irminsul+repair:0.2", mode="deterministic")
    request = result.request
    assert len(request.entries) == len(blind.request.entries)
    assert len(request.private) > 2
    for page in request.private:
        assert result.cache.in_flight[page] == 1
        assert result.cache.tree.fill[page] == 0  # no walk enters it
    after = complete(result.cache, request)
    assert (after.tree.namespace[request.private] == FREE).all()
    assert int((after.tree.namespace == FREE).sum()) == free - len(request.pages)
    for before, pages in zip(stored, (after.pool.latent_pages, after.pool.rope_pages), strict=True):
        np.testing.assert_array_equal(np.asarray(pages)[:, held], before[:, held])


def test_where_private_copies_do_not_fit_the_prompt_is_still_served(model, config):
    """Without reuse rather than without repair."""
    small = dataclasses.replace(config, num_pages=36)
    cache = serve(model, new_cache(small, model.row_format), FIRST[:260]).cache
    served = serve(model, cache, SECOND[:280], "irminsul+repair:1.0")
    assert served.bins["repair"] == 0
    full = serve(model, new_cache(config, model.row_format), SECOND[:280], "full")
    assert_close(served.logits, full.logits)


def test_epic_takes_the_first_tokens_of_every_run(model, cache):
    """Two runs: the body was cut in two by new tokens."""
    tokens = np.concatenate([random_tokens(5, 61), BODY[:150], random_tokens(6, 41), BODY[150:], random_tokens(7, 9)])
    plan = prefill(model, cache, tokens, "epic:17", mode="deterministic", donate=False).request.plan
    shifted = np.isin(plan.bin_of_token, (SHIFTED, REPAIR))
    starts = np.flatnonzero(shifted & ~np.roll(shifted, 1))
    assert len(starts) == 2
    np.testing.assert_array_equal(repaired(plan), np.concatenate([start + np.arange(17) for start in starts]))


def test_choices_against_their_definitions():
    """Plain Python, token by token."""
    rng = np.random.default_rng(0)
    offset, score = rng.integers(0, 50, 97), rng.random(97).astype(np.float32)
    score[rng.random(97) < 0.2] = 0
    epic = choose_repairs(get_policy("epic:13"), offset)
    assert [bool(x) for x in epic] == [int(o) < 13 for o in offset]
    for fraction in (0.0, 0.05, 0.5, 1.0):
        chosen = choose_repairs(get_policy("cacheblend", repair_fraction=fraction), offset, score)
        best = sorted(range(97), key=lambda i: (-score[i], i))[: int(fraction * 97)]
        assert sorted(np.flatnonzero(chosen)) == sorted(i for i in best if score[i] > 0)


@struct.dataclass
class Attending:
    """Dense attention of all tokens among the ``visible`` ones, in which what the last ``asking`` give is added up."""

    visible: jax.Array
    given: jax.Array
    asking: int = struct.field(pytree_node=False)

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, rotary, scale):
        key = rotate(k_rope, jnp.arange(len(c_kv)), rotary)
        scores = jnp.einsum("MHK,NC,HKC->HMN", q_nope, c_kv, w_uk) + jnp.einsum("MHR,NR->HMN", q_rope, key)
        weights, view = self.weights(scores * scale)
        return jnp.einsum("HMN,NC,HCV->MHV", weights, c_kv, w_uv), view

    def attend_grouped(self, layer, query, key, value, rotary, scale):
        repeats = query.shape[1] // key.shape[1]
        key, value = (jnp.repeat(x, repeats, axis=1) for x in (rotate(key, jnp.arange(len(key)), rotary), value))
        weights, view = self.weights(jnp.einsum("MHD,NHD->HMN", query, key) * scale)
        return jnp.einsum("HMN,NHD->MHD", weights, value), view

    def weights(self, scores):
        token = jnp.arange(scores.shape[-1])
        seen = (token[None] <= token[:, None]) & (self.visible[None] | (token[None] == token[:, None]))
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        return weights, dataclasses.replace(self, given=self.given + weights[:, -self.asking :].mean((0, 1)))


@pytest.mark.parametrize("kind", ["latent", "grouped"])
def test_what_the_question_attends_to_among_turned_rows(model, config, kind):
    """Against dense attention, in a model of one layer: there a turned row is the fresh one."""
    model = (families.random_model(TINY_GQA, seed=0) if kind == "grouped" else model).first_layers(1)
    cache = serve(model, new_cache(config, model.row_format), FIRST).cache
    plan = plan_of(model, cache, SECOND)
    asking = 16  # the eleven tokens that are new at the end are fewer
    reused = np.flatnonzero(np.isin(plan.bin_of_token, (EXACT, SHIFTED)))
    reused = reused[reused < len(SECOND) - asking]
    visible = np.zeros(len(SECOND), bool)
    visible[reused] = visible[-asking:] = True
    dense = Attending(jnp.asarray(visible), jnp.zeros(len(SECOND)), asking)
    _, dense = model.forward(jnp.asarray(SECOND), jnp.arange(len(SECOND)), dense)
    actual = question_attention(model, cache, plan, np.arange(len(SECOND), dtype=np.int32))
    assert_close(actual[reused], np.asarray(dense.given)[reused])
    assert len(reused) > 250
    assert not np.delete(actual, reused).any()
    assert 0.1 < actual.sum() < 1


def test_repair_by_question_takes_what_is_dependent_and_attended_to(model, cache):
    plan = plan_of(model, cache, SECOND)
    rows = shifted_rows(cache.tree, plan)
    attention = attention_counts(question_attention(model, cache, plan, rows.position))
    assert attention.mean() == pytest.approx(1 + attention.min(), rel=0.2)
    by_question, by_dependence = (
        repaired(prefill(model, cache, SECOND, f"irminsul+{how}:0.1", mode="deterministic", donate=False).request.plan)
        for how in ("question", "repair")
    )
    assert len(by_question) == len(by_dependence) == int(0.1 * len(rows))
    given = dict(zip(rows.position.tolist(), attention.tolist(), strict=True))
    mine, others = (np.mean([given[at] for at in chosen.tolist()]) for chosen in (by_question, by_dependence))
    assert mine > others


@pytest.mark.parametrize("kind", ["latent", "grouped"])
def test_cacheblend_measures_the_second_layer(model, config, kind):
    """Against a dense forward of both prompts: rows of layer 1, keys turned to where they stand."""
    if kind == "grouped":
        model = families.random_model(TINY_GQA, seed=0)
    cache = serve(model, new_cache(config, model.row_format), FIRST).cache
    rows = shifted_rows(cache.tree, plan_of(model, cache, SECOND))
    old, new = (second_layer_rows(model, tokens) for tokens in (FIRST, SECOND))
    expected = sum(
        ((a[rows.place] - b[rows.position]) ** 2).reshape(len(rows), -1).sum(axis=-1)
        for a, b in zip(old, new, strict=True)
    )
    # Keys enter by their difference at one position, and a rotation keeps distances.
    actual = second_layer_deviation(model, cache, SECOND, rows, blocks_for(model, "deterministic"))
    assert len(actual) == len(rows) > 250
    assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert expected.max() > 0.1


@struct.dataclass
class RowView(DenseView):
    """Dense attention that collects what a cache would keep, keys before rotation."""

    latent: jax.Array | None = None
    rope: jax.Array | None = None

    def attend_latent(self, layer, q_nope, q_rope, c_kv, k_rope, *rest):
        out, _ = super().attend_latent(layer, q_nope, q_rope, c_kv, k_rope, *rest)
        return out, self._with_rows(layer, c_kv, k_rope)

    def attend_grouped(self, layer, query, key, value, *rest):
        out, _ = super().attend_grouped(layer, query, key, value, *rest)
        return out, self._with_rows(layer, value, key)

    def _with_rows(self, layer, latent, rope):
        tokens = len(self.positions)
        return dataclasses.replace(
            self,
            latent=self.latent.at[layer].set(latent.reshape(tokens, -1)),
            rope=self.rope.at[layer].set(rope.reshape(tokens, -1)),
        )


def second_layer_rows(model, tokens) -> tuple[np.ndarray, np.ndarray]:
    rows, positions = model.row_format, jnp.arange(len(tokens))
    shape = rows.num_layers, len(tokens)
    latent, rope = (jnp.zeros((*shape, width)) for width in (rows.latent_width, rows.rope_width))
    view = RowView(positions, latent=latent, rope=rope)
    _, view = jax.jit(model.forward)(jnp.asarray(tokens), positions, view)
    return np.asarray(view.latent)[1], np.asarray(view.rope)[1]


def test_ours_takes_the_most_dependent_tokens_of_other_contexts(model, cache):
    """Its choice is the budget's worth of the largest shares of attention that left the run."""
    plan = prefill(model, cache, SECOND, "irminsul+repair:0.1", mode="deterministic", donate=False).request.plan
    rows = shifted_rows(cache.tree, plan)
    profile = np.asarray(cache.pool.dependence)[:, rows.page, rows.row].T
    share = dependence_at(profile, rows.offset)
    order = sorted(range(len(rows)), key=lambda i: (-share[i], i))[: int(0.1 * len(rows))]
    np.testing.assert_array_equal(repaired(plan), np.sort(rows.position[order]))
    assert share[order].min() > np.median(share)


def test_rows_behind_the_context_they_were_computed_behind_are_left_alone(model, config):
    """The second turn of a session: its first turn's shifted rows are reused again, what was computed behind them
    stands where it did, and only rows of another context are repaired."""
    cache = serve(model, new_cache(config, model.row_format), FIRST).cache
    cache = serve(model, cache, SECOND, "irminsul+repair:0.5").cache
    tail = random_tokens(8, 83)
    cache = serve(model, cache, np.concatenate([SECOND, tail]), "irminsul+repair:0.5").cache
    third = np.concatenate([SECOND, tail, random_tokens(9, 5)])
    plan = plan_of(model, cache, third)
    rows = shifted_rows(cache.tree, plan)
    same = same_context(cache.provenance, cache.tree, rows, third)
    in_tail = (rows.position >= len(SECOND)) & (rows.position < len(SECOND) + len(tail))
    assert in_tail.sum() >= 80
    assert same[in_tail].all()
    moved = rows.place != rows.position
    assert moved.any()
    assert not same[moved].any()
    served = serve(model, cache, third, "irminsul+repair:1.0")
    assert set(repaired(served.plan)) == set(rows.position[~same].tolist())
    other = np.concatenate([random_tokens(10, len(SECOND)), tail, random_tokens(9, 5)])
    elsewhere = shifted_rows(served.cache.tree, plan_of(model, served.cache, other))
    assert len(elsewhere) >= 50
    assert not same_context(served.cache.provenance, served.cache.tree, elsewhere, other).any()


def test_decoding_reads_repaired_rows(model, config):
    tokens = np.concatenate([SECOND, random_tokens(11, 3)])
    full = serve(model, new_cache(config, model.row_format), tokens, "full")
    for policy, close in (("epic:600", True), ("irminsul", False)):
        cache = serve(model, new_cache(config, model.row_format), FIRST).cache
        result = prefill(model, cache, SECOND, policy, mode="deterministic", new_tokens=3)
        decoding = start_decoding(result.cache, result.request, result.logits)
        for token in tokens[len(SECOND) :].tolist():
            decoding = advance(model, decoding, token)
        assert np.allclose(decoding.logits, full.logits, atol=2e-5) == close


def test_policies_name_their_budget():
    assert get_policy("epic:8").repair_tokens == 8
    assert get_policy("cacheblend:0.3") == dataclasses.replace(
        get_policy("cacheblend"), name="cacheblend:0.3", repair_fraction=0.3
    )
    for name, message in (
        ("irminsul:3", "takes no budget"),
        ("epic:0.5", "no valid budget"),
        ("cacheblend:much", "no valid budget"),
        ("irminsul+repair:1.5", "repair_fraction=1.5"),
        ("epic:-1", "repair_tokens=-1"),
        ("blend", "unknown; choose one of full"),
    ):
        with pytest.raises(ValueError, match=message):
            get_policy(name)


def test_choices_that_cannot_be_made_are_refused_before_anything_changes(model, config):
    plain = new_cache(dataclasses.replace(config, dependence=False), model.row_format)
    plain = serve(model, plain, FIRST).cache
    with pytest.raises(ValueError, match="create it with dependence=True"):
        prefill(model, plain, SECOND, "irminsul+repair", mode="deterministic")
    for policy in ("cacheblend", "irminsul+repair"):
        planned = prefill(None, new_cache(config), FIRST)
        planned = complete(planned.cache, planned.request)
        with pytest.raises(ValueError, match="use repair='leading'"):
            prefill(None, planned, SECOND, policy)
        assert prefill(None, planned, SECOND, "epic:8").request.plan.bins["repair"] == 8
