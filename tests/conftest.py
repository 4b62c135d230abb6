"""Every test runs with checked shapes, strict dtype promotion, no silent rank promotion and warnings as errors."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

_CHECKED = ("irminsul", "models", "pallas_kernels")
_register_dataclass = jax.tree_util.register_dataclass


def _register_unchecked(cls, data_fields=None, meta_fields=None, **kwargs):
    """Registers a structure of the project so that unflattening bypasses its checked ``__init__``.

    jax rebuilds structures with leaves that are no arrays (argument descriptions, shapes, specs); only what the project
    itself constructs is checked.
    """
    if not cls.__module__.startswith(_CHECKED):
        return _register_dataclass(cls, data_fields, meta_fields, **kwargs)

    def flatten_with_keys(value):
        children = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in data_fields]
        return children, tuple(getattr(value, name) for name in meta_fields)

    def unflatten(meta, data):
        value = object.__new__(cls)
        for name, leaf in zip([*data_fields, *meta_fields], [*data, *meta], strict=True):
            object.__setattr__(value, name, leaf)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


jax.tree_util.register_dataclass = _register_unchecked  # flax.struct registers its dataclasses through it
install_import_hook(_CHECKED, "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Packages whose tests compile much and compute little. The cache's laws are tested on the code that its users run.
_COMPILE_MUCH = (
    "tests/experiments/",
    "tests/models/",
    "tests/pallas_kernels/",
    *(f"tests/irminsul/test_{name}.py" for name in ("eviction", "indexed_attention", "relatives", "repair", "rope")),
)


@pytest.fixture(autouse=True, scope="module")
def _plain_code(request):
    """Leaves out the compiler's optimisation of machine code for the tests of some packages: nearly half their time."""
    plain = jax.default_backend() == "cpu" and request.node.nodeid.startswith(_COMPILE_MUCH)
    jax.config.update("jax_disable_most_optimizations", plain)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
