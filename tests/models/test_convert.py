"""Conversion of grouped attention to MLA: the lossless form is the same function, cheaper ones are ordered as they
should be, and a conversion survives being stored."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import checkpoint, convert, families
from models.convert import key_basis, weighted_basis
from models.convert.pairs import interleaving, pair_moments, real_map
from models.kv_view import DenseView
from models.rotary import frequencies
from tests.tolerances import assert_close

FIELDS = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 26,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0}
VARIANTS = {
    "grouped": {},
    "heads": {"num_key_value_heads": 6, "rope_interleave": True, "tie_word_embeddings": False},
    "one head": {"num_key_value_heads": 1, "attention_bias": True},
    "biases and amplitude": {"model_type": "qwen2", "rope_scaling": YARN},
    "normed heads": {"model_type": "qwen3"},
}


def original(**changes):
    """Random weights, norms and biases included."""
    model = families.random_model(FIELDS | changes, seed=1)
    leaves, tree = jax.tree.flatten(model.params)
    draw = np.random.default_rng(2)
    moved = [leaf + 0.1 * draw.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    return families.model(model.family, model.config, jax.tree.unflatten(tree, moved))


@jax.jit
def logits(model, tokens):
    positions = jnp.arange(len(tokens)) + 7
    return model.unembed(model.forward(tokens, positions, DenseView(positions))[0])


def parts(values):
    """Real and imaginary parts, on a last axis of two."""
    return np.stack([values.real, values.imag], axis=-1)


def text(seed, *shape):
    return np.random.default_rng(seed).integers(0, 97, shape).astype(np.int32)


@pytest.fixture(scope="module")
def grouped():
    return original()


@pytest.fixture(scope="module")
def statistics(grouped):
    return convert.calibrate(grouped, text(3, 2, 256))


@pytest.mark.parametrize("variant", VARIANTS)
def test_lossless_form_is_the_same_function(variant):
    model = original(**VARIANTS[variant])
    converted = convert.apply(model, convert.convert(model, None, method="lossless"))
    width = model.config.num_key_value_heads * model.config.head_dim
    row = converted.row_format
    assert (row.kind, row.latent_width, row.rope_width) == ("latent", width, width)
    expected = logits(model, text(4, 61))
    assert_close(logits(converted, text(4, 61)), expected, atol=1e-4)
    assert np.abs(logits(converted, text(5, 61)) - expected).max() > 0.1


@pytest.mark.parametrize("variant", ["biases and amplitude", "normed heads"])
def test_a_weighted_basis_that_keeps_everything_is_lossless_and_one_that_does_not_is_near(variant):
    model = original(**VARIANTS[variant])
    found = convert.calibrate(model, text(3, 1, 256))
    whole = convert.convert(model, found, rope_width=36)
    assert np.abs(whole.mix.imag).max() > 0.01
    expected = logits(model, text(4, 61))
    assert_close(logits(convert.apply(model, whole), text(4, 61)), expected, atol=1e-4)

    def error(width, rank=None):
        conversion = convert.convert(model, found, rope_width=width, rank=rank)
        return np.square(logits(convert.apply(model, conversion), text(4, 61)) - expected).mean()

    assert error(30) < error(8)
    assert error(30) < error(30, 11)


def test_statistics_are_those_of_a_loop(grouped):
    tokens, width, groups = text(6, 23), 12, 3
    found = convert.calibrate(grouped, [tokens])
    attention = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), grouped.params["layers"]["attention"])
    x = np.asarray(grouped.params["embed"], np.float64)[tokens]
    x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + grouped.config.rms_norm_eps)
    x = x * np.asarray(grouped.params["layers"]["input_norm"][0])
    query, key, value = (np.einsum("MD,DHK->MHK", x, attention[name]) for name in ("query", "key", "value"))
    query, key = (part[..., :6] + 1j * part[..., 6:] for part in (query, key))  # half-split pairs
    moments = np.einsum("MA,MB->AB", key.reshape(23, -1), key.reshape(23, -1).conj()) / 23
    assert_close(parts(pair_moments(found.rows[0, :36, :36])), parts(moments), atol=1e-4)
    theta = frequencies(grouped.config.rope_parameters, width)
    seen, turned = np.zeros((2, 6, 6, 3, 3), complex)
    for head in range(6):
        for m in range(23):
            turn = np.exp(1j * theta * np.arange(m, -1, -1)[:, None])
            scores = (query[m, head] * key[: m + 1, head // (6 // groups)].conj() * turn).sum(axis=-1).real / width**0.5
            share = np.exp(scores - scores.max())
            share /= share.sum()
            values = value[: m + 1, head // (6 // groups)]
            moved = (values - share @ values) @ attention["out"][head]
            for n in range(1, m + 1):
                weight = share[n] * np.square(moved[n]).sum() * np.abs(query[m, head]) ** 2 / 23
                pairs = np.einsum("JF,IF->FJI", key[n], key[n].conj())
                seen[head] += weight[:, None, None] * pairs
                turned[head] += (weight * turn[n])[:, None, None] * pairs
    assert_close(parts(found.seen[0]), parts(seen), atol=1e-4)
    assert_close(parts(found.turned[0]), parts(turned), atol=1e-4)
    assert np.abs(seen - turned).max() > 0.01


@pytest.mark.parametrize("method", ["query_weighted", "principal", "folded", "two_norm"])
def test_every_layer_keeps_as_many_slots_each_once_in_order_of_frequency(grouped, statistics, method):
    conversion = convert.convert(grouped, statistics, method=method, rope_width=12, rank=19)
    assert conversion.slots.shape == (3, 6)
    assert all(len(set(row.tolist())) == 6 for row in conversion.slots)
    assert (np.diff(conversion.indices, axis=1) >= 0).all()
    assert (conversion.rope_width, conversion.rank) == (12, 19)
    converted = convert.apply(grouped, conversion)
    assert converted.rotary.fine_cos.shape == (3, 1024, 6)
    assert np.isfinite(logits(converted, text(4, 61))).all()


def test_keys_along_one_direction_keep_it_rotary_at_every_frequency(grouped, statistics):
    """RoRoPE finds a direction over heads that holds all keys; then nothing that is stripped had any energy."""
    draw = np.random.default_rng(8)
    keys = np.einsum("NF,G->NGF", draw.standard_normal((100, 12)), [3.0, -4.0, 12.0]).reshape(100, 36)
    rows = statistics.rows.copy()
    rows[:, :36, :36] = keys.T @ keys / 100
    basis = key_basis.principal(dataclasses.replace(statistics, rows=rows), grouped.config, 12)
    assert_close(np.abs(basis.mix[0, :, :, 0]), np.tile(np.array([3, 4, 12]) / 13, (6, 1)))
    assert basis.slots[0].tolist() == [0, 3, 6, 9, 12, 15]


def test_what_costs_least_is_stripped(grouped, statistics):
    """Frequencies that do not turn are free to strip, whatever rounding makes of them; a better basis costs less."""
    turned = statistics.turned.copy()
    turned[:, :, 4:] = statistics.seen[:, :, 4:] * (1 + 1e-7)
    basis = weighted_basis.query_weighted(dataclasses.replace(statistics, turned=turned), grouped.config, 12)
    assert np.linalg.cond(basis.mix).max() < 1e3
    assert basis.indices.max() < 4


def test_what_stripping_costs_is_that_of_pairs_and_no_other_damping_costs_less():
    """Queries, keys and distances drawn one by one: the cost is the mean of what their scores lose."""
    draw = np.random.default_rng(11)
    query, keys = (draw.standard_normal((2, *shape)) for shape in ((50, 4), (50, 3)))
    query, keys = query[0] + 1j * query[1], keys[0] + 1j * keys[1]
    turn = np.exp(0.3j * draw.integers(0, 9, 50))
    group = np.repeat(np.arange(3), [2, 1, 1])
    pairs = np.einsum("ZH,ZS,ZT->ZHST", np.abs(query) ** 2, keys, keys.conj())
    seen, turned = pairs.mean(axis=0)[None], (pairs * turn[:, None, None, None]).mean(axis=0)[None]
    mix = (draw.standard_normal((3, 3)) + 1j * draw.standard_normal((3, 3)))[None]
    for kept in range(3):
        found, damping = weighted_basis.cost(mix, kept, seen, turned, group)
        own = keys @ np.linalg.inv(mix[0]).T
        scores = query * (own[:, kept:] @ mix[0, :, kept:].T)[:, group].conj()
        ways = [damping[0], damping[0] * 1.01, damping[0] * np.exp(0.01j)]
        lost, longer, turned_on = (np.square(np.abs(scores * (turn[:, None] - way))).mean(axis=0).sum() for way in ways)
        assert found[0] == pytest.approx(lost)
        assert lost < min(longer, turned_on)
    assert weighted_basis.cost(mix, 3, seen, turned, group)[0] == pytest.approx(0)


def test_slots_are_allotted_as_by_trying_all():
    costs = np.sort(np.random.default_rng(10).random((4, 4)), axis=1)[:, ::-1]
    for total in range(13):
        counts = weighted_basis.allot(costs, total)
        ways = [way for way in itertools.product(range(4), repeat=4) if sum(way) == total]
        assert counts.sum() == total
        assert costs[range(4), counts].sum() == min(costs[range(4), way].sum() for way in ways)


def test_complex_maps_commute_with_rotation_and_orders_make_pairs():
    draw = np.random.default_rng(9)
    matrix = draw.standard_normal((3, 5)) + 1j * draw.standard_normal((3, 5))
    x = draw.standard_normal(5) + 1j * draw.standard_normal(5)
    flat = np.stack([x.real, x.imag], axis=-1).reshape(-1)
    out = real_map(matrix) @ flat
    assert_close(out.reshape(-1, 2), parts(matrix @ x), "float64")
    assert interleaving(6, False).tolist() == [0, 3, 1, 4, 2, 5]
    assert interleaving(6, True).tolist() == list(range(6))


@pytest.mark.parametrize("variant", ["one head", "normed heads"])
def test_an_exported_model_is_read_like_any_other(variant, tmp_path):
    model = original(**VARIANTS[variant])
    converted = convert.apply(model, convert.convert(model, None, method="lossless"))
    checkpoint.save_safetensors(converted, tmp_path)
    exported = checkpoint.load(tmp_path, jnp.float32)
    assert exported.config == converted.config
    assert exported.config.model_type == "converted_mla"
    assert_close(logits(exported, text(4, 61)), logits(converted, text(4, 61)))


def test_a_stored_conversion_is_the_same_and_belongs_to_its_weights(grouped, statistics, tmp_path):
    conversion = convert.convert(grouped, statistics, rope_width=12, rank=29)
    converted = convert.apply(grouped, conversion)
    convert.save(conversion, tmp_path, calibration="noise")
    again = convert.apply(grouped, convert.load(tmp_path))
    assert_close(logits(again, text(4, 61)), logits(converted, text(4, 61)), atol=0.05)  # vectors are kept in float16
    other = original(tie_word_embeddings=False)
    with pytest.raises(ValueError, match="was made for weights with digest"):
        convert.apply(other, conversion)
    with pytest.raises(FileNotFoundError, match="written by models"):
        convert.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "method='magic' is unknown"),
        ({"method": "lossless", "rank": 5}, "give neither"),
        ({"rope_width": 7}, "must be even"),
        ({"rope_width": 38}, r"in 2\.\.36"),
        ({"rope_width": 12, "rank": 61}, r"rank=61 must lie in 1\.\.60"),
        ({"method": "principal", "rope_width": 10}, "a multiple of 12"),
    ],
)
def test_bad_choices_are_told(grouped, statistics, options, message):
    with pytest.raises(ValueError, match=message):
        convert.convert(grouped, statistics, **options)


def test_models_that_cannot_be_converted_are_told(grouped):
    latent = convert.apply(grouped, convert.convert(grouped, None, method="lossless"))
    for refuse in (lambda: convert.convert(latent, None, method="lossless"), lambda: convert.calibrate(latent, [])):
        with pytest.raises(ValueError, match="no grouped attention to convert"):
            refuse()
    with pytest.raises(ValueError, match="pass what calibrate returns"):
        convert.convert(grouped, None)
    with pytest.raises(ValueError, match="none of two tokens or more"):
        convert.calibrate(grouped, [np.zeros(1, np.int32)])


def test_token_blocks_stream():
    read = []

    def documents():
        for number in range(100):
            read.append(number)
            yield "x" * 5

    blocks = list(convert.token_blocks(documents(), lambda text: np.full(len(text), 7), 11, 3, 2))
    assert [block.tolist() for block in blocks] == [
        [3, 7, 7, 7, 7, 7, 3, 7, 7, 7, 7],
        [7, 3, 7, 7, 7, 7, 7, 3, 7, 7, 7],
    ]
    assert len(read) == 4
