"""The key of a request: one field apart is another owner, and modes that write other bits do not share rows."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from irminsul.cache import new_cache
from irminsul.cache_key import namespace_prefix, request_key
from pallas_kernels.rotary import rotary_table
from tests.irminsul.serving import assert_same_bits, random_tokens, serve

FIELDS: dict[str, Any] = {
    "namespace": "ada",
    "adapter": "",
    "bitwise": True,
    "mode": "deterministic",
    "context": "private",
}
OTHERS: dict[str, dict[str, Any]] = {
    "namespace": {"namespace": "bob"},
    "a namespace that goes on": {"namespace": "adapter"},
    "adapter": {"adapter": "lora"},
    "bitwise": {"bitwise": False},
    "mode": {"mode": "fast"},
    "published": {"context": "published"},
    "isolated": {"context": "isolated"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_one_field_apart_is_another_key(model, config, other):
    cache = new_cache(config)
    key = request_key(cache, model, **FIELDS)
    assert key == request_key(new_cache(config), dataclasses.replace(model), **FIELDS)
    assert key != request_key(cache, model, **{**FIELDS, **OTHERS[other]})
    assert key.startswith(namespace_prefix("ada"))
    namespace = {**FIELDS, **OTHERS[other]}["namespace"]
    assert request_key(cache, model, **{**FIELDS, **OTHERS[other]}).startswith(namespace_prefix("ada")) == (
        namespace == "ada"
    )


def test_models_that_differ_in_weights_rows_or_frequencies_have_keys_of_their_own(model, config):
    half = model.row_format.rope_width // 2
    turned = rotary_table(np.linspace(0.1, 0.9, half), interleaved=model.rotary.interleaved)
    swapped = dataclasses.replace(model.rotary, interleaved=not model.rotary.interleaved)
    models = [
        model,
        dataclasses.replace(model, digest="0123456789abcdef"),
        dataclasses.replace(model, rotary=turned),
        dataclasses.replace(model, rotary=swapped),
        dataclasses.replace(model, config=dataclasses.replace(model.config, rope_interleave=False)),
        None,
    ]
    configs = [
        config,
        dataclasses.replace(config, dtype="bfloat16"),
        dataclasses.replace(config, storage="unrotated"),
        dataclasses.replace(config, page_size=17),
        dataclasses.replace(config, chunking=dataclasses.replace(config.chunking, seed=1)),
    ]
    keys = {request_key(new_cache(c, None), m, **FIELDS) for m in models for c in configs}
    assert len(keys) == len(models) * len(configs)
    bigger = dataclasses.replace(config, num_pages=2 * config.num_pages)  # says nothing about a row
    assert request_key(new_cache(bigger), model, **FIELDS) in keys


def test_law_2_holds_in_a_cache_that_both_modes_use(model, config):
    """Rows of the fast mode are other bits than those of a cold deterministic prefill."""
    tokens = random_tokens(1, 401)
    cold = serve(model, new_cache(config, model.row_format), tokens)
    fast = serve(model, new_cache(config, model.row_format), tokens, mode="fast")
    assert not np.array_equal(fast.logits, cold.logits)
    first = serve(model, fast.cache, tokens)
    assert first.bins["exact"] == first.bins["shifted"] == 0
    assert_same_bits(first, cold)
    again = serve(model, first.cache, tokens)
    assert again.bins["exact"] == 400
    assert_same_bits(again, cold)
    assert serve(model, again.cache, tokens, mode="fast").bins["exact"] == 400
