"""Every test runs with checked shapes, strict dtype promotion, no silent rank promotion and warnings as errors."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jaxtyping import install_import_hook

install_import_hook(["irminsul", "models", "pallas_kernels"], "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
