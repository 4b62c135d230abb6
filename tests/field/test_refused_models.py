"""Models whose keys can be moved are moved; those whose cache cannot be are refused by name before they serve."""

import numpy as np
import pytest

from irminsul.cache import CacheConfig
from irminsul.engine import Engine
from irminsul.policies import get_policy
from models import families
from tests.irminsul.conftest import SMALL_CHUNKS, TINY_MLA
from tests.irminsul.serving import random_tokens
from tests.models.tiny import V2, V3

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.707, "mscale_all_dim": 0.707}
CONFIG = CacheConfig(num_pages=61, page_size=13, max_prompt_tokens=251, max_new_tokens=0, chunking=SMALL_CHUNKS)


@pytest.mark.parametrize("fields", [V2, V3 | {"rope_scaling": YARN}], ids=["v2", "v3 with yarn"])
def test_deepseek_models_are_served_shifted_and_never_crash(fields):
    """The keys of DeepSeek-V2 and V3, YaRN included, move: the self-test passes and a moved document is reused."""
    model = families.random_model(fields, seed=0, num_hidden_layers=2)
    engine = Engine.create(model, CONFIG, get_policy("irminsul", min_reuse=16, sink_tokens=8), "deterministic")
    document = random_tokens(0, 150, model.vocab_size)
    engine.serve(np.concatenate([random_tokens(1, 17, model.vocab_size), document]))
    response = engine.serve(np.concatenate([random_tokens(2, 29, model.vocab_size), document]))
    assert response.bins["shifted"] > 130
    assert np.isfinite(response.logits).all()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("kimi_linear", "some of its layers keep a recurrent state"),
        ("deepseek_v4", "its cache rows aggregate several tokens"),
        ("mamba2", "its state is recurrent"),
        ("jamba", "some of its layers keep a recurrent state"),
        ("qwen3_next", "some of its layers keep a recurrent state"),
    ],
)
def test_models_with_aggregated_or_recurrent_state_are_refused_by_name(model_type, reason):
    """No silence of zero hits: the refusal says which model, why, and what to do instead."""
    families.read_config(TINY_MLA)
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as caught:
        families.read_config(TINY_MLA, model_type=model_type)
    assert f"model_type={model_type!r} is refused because {reason}" in str(caught.value)
    assert "serve it without this cache" in str(caught.value)
