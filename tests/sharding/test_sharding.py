"""One device against eight: the same logits, no page of the pool on the move, checkpoints read part by part."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from experiments.errors import InputError
from experiments.latency import QUICK_SHAPE
from experiments.sharding_load import write_synthetic
from experiments.sharding_processes import mesh_of
from models import families, sharding, slab_reader
from models.checkpoint import check_tensors, read_published
from models.device_plan import device_plan
from models.safetensors_reader import CheckpointError
from models.sharded_checkpoint import printed_progress
from models.slab_reader import SlabReader


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
        assert results[case]["step_pages"] < 1  # of a step that decodes: logits alone
        assert results[case]["step_aliased"] >= results[case]["pool"]

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
        experts = 58 * 257 * 3 * 7168 * 2048 * 2  # the one of all tokens, too: 16 columns a device
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

    def test_the_expert_of_all_tokens_stands_whole_where_its_columns_do_not_divide(self):
        shared = 60 * 3 * 7168 * 2048 * 2
        wide, narrow = (device_plan("kimi-k2", {"expert": n}, memory_bytes=10**12) for n in (96, 64))
        routed = 384 * shared  # 2,048 columns divide by 64, not by 96
        assert (
            wide.parameter_bytes_per_device - narrow.parameter_bytes_per_device
            == routed // 96 - routed // 64 + shared - shared // 64
        )
        both = device_plan("kimi-k2", {"expert": 48, "tensor": 2}, memory_bytes=1).collective_bytes_per_token
        assert both["feed_forward"] == 61 * 7168 * 2  # a sum of its own over two devices of ``tensor``
        assert narrow.collective_bytes_per_token["feed_forward"] == 0

    def test_what_does_not_divide_is_named(self):
        with pytest.raises(ValueError, match="tensor=3"):
            device_plan("deepseek-v3", {"tensor": 3}, memory_bytes=1)
        with pytest.raises(ValueError, match="'pipeline' is unknown"):
            device_plan("deepseek-v3", {"pipeline": 2}, memory_bytes=1)
        assert device_plan("deepseek-v3", {"tensor": 2}, memory_bytes=1).cache_tokens == 0


def test_progress_is_said_with_its_rate(capsys):
    progress = printed_progress(every=1.0)
    for done, seconds in ((1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)):
        progress(done * 10**9, 4 * 10**9, seconds)
    assert capsys.readouterr().err == "2.0 of 4.0 GB read, 2.00 GB/s\n4.0 of 4.0 GB read, 2.00 GB/s\n"


class TestSlabs:
    @pytest.fixture
    def values(self, tmp_path, monkeypatch):
        monkeypatch.setattr(slab_reader, "SLAB_BYTES", 2**20)
        values = np.random.default_rng(0).integers(0, 2**16, (1000, 6000), np.uint16)
        (tmp_path / "file").write_bytes(b"head" + values.tobytes() + b"tail")
        with (tmp_path / "file").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return values, np.asarray(np.memmap(tmp_path / "file", np.uint16, "r", 4, values.shape))

    def test_they_cover_a_tensor_in_the_order_of_its_file_and_are_alike(self, values):
        values, mapped = values
        seen, shapes, reader = np.zeros_like(values.T), set(), SlabReader()
        for (row, column), piece in slab_reader.slabs(mapped.T, (1, 0)):
            read = reader.read(piece.T)
            assert read.flags.c_contiguous
            seen[row : row + piece.shape[0], column : column + piece.shape[1]] = read.T
            shapes.add(piece.shape)
        assert np.array_equal(seen, values.T)
        assert len(shapes) == 1  # each shape takes a program

    def test_cached_pages_are_taken_and_others_are_read_past_the_cache(self, values, tmp_path, monkeypatch):
        values, mapped = values
        taken = []
        monkeypatch.setattr(slab_reader, "read_directly", lambda *where: taken.append(where) or False)
        cached = slab_reader._is_cached(mapped)
        assert np.array_equal(SlabReader().read(mapped[:100]), values[:100])  # by the map where it cannot be otherwise
        assert len(taken) == (not cached)
        assert np.array_equal(mapped[:100], values[:100])
        assert slab_reader._is_cached(mapped[:100])
        assert np.array_equal(SlabReader().read(mapped[:100]), values[:100])
        assert len(taken) == (not cached)

    def test_what_is_no_block_of_a_file_is_copied_and_let_go(self, values):
        values, mapped = values

        def resident() -> int:
            status = Path("/proc/self/status")
            found = re.search(r"RssFile:\s+(\d+)", status.read_text()) if status.exists() else None
            return 1024 * int(found[1]) if found else 0

        before, most, reader = resident(), 0, SlabReader()
        for begin in range(0, 1000, 100):
            assert np.array_equal(reader.read(mapped[begin : begin + 100, :5000]), values[begin : begin + 100, :5000])
            most = max(most, resident())
        assert most - before < values.nbytes / 2
        assert np.array_equal(mapped, values)  # they come back

    def test_a_file_that_was_cut_is_said(self, tmp_path):
        memory = slab_reader.aligned(2**16)
        (tmp_path / "file").write_bytes(bytes(range(256)) * 256)
        file = slab_reader.open_directly(tmp_path / "file")
        if file is None or not slab_reader.read_directly(file, memory, 0, 2**16):
            pytest.skip("this file system has no reads past the page cache")
        assert np.array_equal(memory, np.tile(np.arange(256, dtype=np.uint8), 256))
        (tmp_path / "file").write_bytes(b"head")
        with pytest.raises(CheckpointError, match="ends 65532 bytes early; download it again"):
            slab_reader.read_directly(file, memory, 0, 2**16)
        os.close(file)


def test_a_mesh_that_compilers_may_not_split_is_refused():
    family, config = families.read_config("deepseek-v2-lite")
    with pytest.raises(ValueError, match=r"'tensor' is Explicit; make the mesh with axis_types"):
        sharding.shardings(family, config, jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Explicit,)))
