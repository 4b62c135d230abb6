"""What is under version control works alone, in a folder that is not this one: packages and weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import json
import irminsul, models
import jax.numpy as jnp
import numpy as np
from irminsul.cache import CacheConfig
from irminsul.engine import Engine

model = models.load("irminsul-mini-mla", jnp.float32)
engine = Engine.create(model, CacheConfig(num_pages=8, max_prompt_tokens=256, max_new_tokens=0))
draw = np.random.default_rng(0).integers
document = draw(0, model.vocab_size, 200)
bins = [engine.serve(np.concatenate([draw(0, model.vocab_size, n), document])).bins for n in (40, 53)]
print(json.dumps([irminsul.__path__[0], models.__path__[0], bins]))
"""


def test_the_packages_serve_a_model_from_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(clone)], check=True)
    environment = os.environ | {"PYTHONPATH": str(clone), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SERVE]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    irminsul, models, bins = json.loads(done.stdout.splitlines()[-1])
    assert (irminsul, models) == (str(clone / "irminsul"), str(clone / "models"))
    assert bins[0]["shifted"] == 0
    assert bins[1]["shifted"] > 64
