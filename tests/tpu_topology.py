"""TPUs to compile for on a machine that has none: `libtpu` describes them and holds their compiler.

The library stands in a folder of its own inside the environment (``.venv/tpu``) and not among its packages, where jax
would find it and look for chips at every start.
"""

import os
import pathlib
import sys

import jax
import pytest
from jax.experimental import topologies

LIBRARY = pathlib.Path(sys.prefix) / "tpu" / "libtpu" / "libtpu.so"
CHIPS = ("v5e", "v6e")


def chip(name):
    """The sharding that means one chip of the kind; skips the test where the library is missing."""
    if not LIBRARY.is_file():
        pytest.skip("libtpu is not in this environment: `make test` installs requirements-tpu.lock into .venv/tpu")
    settings = {
        "TPU_LIBRARY_PATH": str(LIBRARY),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several test processes may compile at once
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LOG_DIR": "disabled",
    }
    os.environ.update({key: value for key, value in settings.items() if key not in os.environ})
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:2x2")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compile_for(name, jitted, *arguments, **static):
    """A jitted function compiled for one chip, which it takes for its default device; arguments may be shapes."""
    sharding = chip(name)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.default_device(*sharding.device_set):
        traced = jitted.trace(*shapes, **static)
    return traced.lower(lowering_platforms=("tpu",)).compile()
