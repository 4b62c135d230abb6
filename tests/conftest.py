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

# Packages whose tests compile much and compute little, and those tests of the cache that compare within tolerances or
# whole numbers (the list of the Makefile). The cache's laws, which compare bits, are tested on the code that users run.
_COMPILE_MUCH = (
    "tests/experiments/",
    "tests/models/",
    "tests/pallas_kernels/",
    *(
        f"tests/irminsul/test_{name}.py"
        for name in ("chunking", "eviction", "fingerprint", "indexed_attention", "relatives")
    ),
)
_left = {"plain": False}  # whether programs without optimisation may be in memory


@pytest.fixture(autouse=True, scope="module")
def _plain_code(request):
    """Leaves out the compiler's optimisation of machine code for the tests of some packages: nearly half their time.

    Tests that compare bits must not meet programs that others left behind: half of what they compare would be of those.
    """
    plain = jax.default_backend() == "cpu" and request.node.nodeid.startswith(_COMPILE_MUCH)
    if _left["plain"] and not plain and request.node.nodeid.startswith("tests/irminsul/"):
        jax.clear_caches()
        _left["plain"] = False
    _left["plain"] |= plain
    jax.config.update("jax_disable_most_optimizations", plain)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
