"""One device against eight: the same logits, no page of the pool on the move, checkpoints read part by part."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

from experiments.errors import InputError
from experiments.latency import QUICK_SHAPE
from experiments.sharding_load import write_synthetic
from experiments.sharding_processes import mesh_of
from models import families, sharding
from models.checkpoint import check_tensors, read_published
from models.device_plan import device_plan


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharding") / "results.json"
    subprocess.run([sys.executable, Path(__file__).parent / "eight_devices.py", path], check=True, timeout=600)
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", ["latent", "grouped"])
class TestEightDevices:
    def test_logits_equal_one_device(self, results, case):
        assert results[case]["uncached"] < 1e-5
        assert results[case]["cached"] < 1e-5
        assert results[case]["moved"] < 1e-3

    def test_cache_hits_alike(self, results, case):
        one, mesh = results[case]["shifted"]
        assert one == mesh
        assert one[0] == 0
        assert one[1] > 0

    def test_no_more_than_a_page_is_gathered_and_the_pool_stays_in_place(self, results, case):
        assert 0 < results[case]["gathered_pages"] <= 1
        assert results[case]["aliased"] >= results[case]["pool"]

    def test_checkpoints_are_read_into_parts(self, results, case):
        assert results[case]["read"]
        assert results[case]["restored"]
        assert results[case]["placed"]


def test_sparse_attention_chooses_the_same_rows_of_all_devices(results):
    one, mesh = results["sparse"]["shifted"]
    assert one == mesh
    assert one[1] > 0
    assert results["sparse"]["cached"] < 1e-5


def test_the_checkpoint_that_is_timed_is_a_published_one_and_takes_no_room(tmp_path):
    total, largest = write_synthetic(tmp_path / "zeros", "deepseek-v2-lite", QUICK_SHAPE, 0.005)
    family, config, stored = read_published(tmp_path / "zeros")
    check_tensors(family, config, stored)
    sizes = [2 * math.prod(tensor.shape) for tensor in stored.values()]
    assert (sum(sizes), max(sizes)) == (total, largest)
    assert 0.004e9 < total < 0.006e9
    (file,) = (tmp_path / "zeros").glob("*.safetensors")
    assert file.stat().st_size > total > 10 * 512 * file.stat().st_blocks
    with pytest.raises(InputError, match="'rows=2' is no mesh"):
        mesh_of("rows=2")
    with pytest.raises(InputError, match="'tensor=999' needs 999 devices"):
        mesh_of("tensor=999")


class TestDevicePlan:
    def test_deepseek_v3_on_128_devices(self):
        plan = device_plan("deepseek-v3", {"expert": 32, "tensor": 4}, memory_bytes=141 * 10**9)
        assert plan.parameters == 671_026_419_200
        experts = 58 * 256 * 3 * 7168 * 2048 * 2
        others = plan.parameter_bytes - experts  # split by heads, but for the projections to the latent and the router
        assert experts / 128 + others / 4 < plan.parameter_bytes_per_device < experts / 128 + 1.25 * others / 4
        assert plan.row_bytes == 61 * 576 * 2
        assert device_plan("deepseek-v3.2", {}, memory_bytes=1).row_bytes == plan.row_bytes + 61 * 128 * 2
        assert plan.cache_tokens == (int(0.9 * 141e9) - plan.parameter_bytes_per_device) // plan.row_bytes

    def test_pages_over_devices_hold_more_tokens_and_send_more_bytes(self):
        one = device_plan("deepseek-v2-lite", {"sequence": 1}, memory_bytes=141 * 10**9)
        four = device_plan("deepseek-v2-lite", {"sequence": 4}, memory_bytes=141 * 10**9)
        assert four.cache_tokens == 4 * one.cache_tokens
        assert one.collective_bytes_per_token["pages"] == 0 < four.collective_bytes_per_token["pages"]

    def test_what_does_not_divide_is_named(self):
        with pytest.raises(ValueError, match="tensor=3"):
            device_plan("deepseek-v3", {"tensor": 3}, memory_bytes=1)
        with pytest.raises(ValueError, match="'pipeline' is unknown"):
            device_plan("deepseek-v3", {"pipeline": 2}, memory_bytes=1)
        assert device_plan("deepseek-v3", {"tensor": 2}, memory_bytes=1).cache_tokens == 0


def test_a_mesh_that_compilers_may_not_split_is_refused():
    family, config = families.read_config("deepseek-v2-lite")
    with pytest.raises(ValueError, match=r"'tensor' is Explicit; make the mesh with axis_types"):
        sharding.shardings(family, config, jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Explicit,)))
