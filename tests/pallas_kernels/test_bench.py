"""The benchmark runs anywhere on little shapes, and its errors are real ones."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench, bench_keys
from pallas_kernels.rotated_latent_attention.arg_specs import SMALL, frequencies
from pallas_kernels.rotated_latent_attention.reference import rotated_latent_attention

DIRECTORY = Path(__file__).parents[2] / "docs" / "benchmarks"


def test_writes_rows_and_ceilings(tmp_path, capsys):
    path = tmp_path / "new" / "result.json"
    bench.main(["--quick", "--only=3_1_37_131", f"--out={path}"])
    result = json.loads(path.read_text())
    assert result["environment"]["timer"] == "host clock"
    assert result["ceilings"]["copy_gbps"] > 0 < result["ceilings"]["matmul_tflops"]
    rows = result["rows"]
    assert [(row["form"], row["delta_pattern"]) for row in rows] == [
        ("absorbed", "every_8_pages"),
        ("absorbed", "none"),
        ("absorbed", "every_page"),
        ("absorbed", "none"),
        ("expanded", "every_8_pages"),
    ]
    assert [row["storage"] for row in rows] == ["base", "base", "base", "unrotated", "base"]
    assert all((row["heads"], row["batch"], row["query_tokens"], row["kv_length"]) == (3, 1, 37, 131) for row in rows)
    assert all(row["microseconds"] > 0 and row["rotation"] for row in rows)
    assert all(row["relative_error"] < 1e-6 for row in rows[:4])
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_errors_see_a_wrong_turn():
    """Keys of every page are turned by another distance: what leaves that out is far off, for each query compared."""
    task = bench.Task(SMALL[1], "absorbed", True, ("every_page",))
    operands = bench.operands_of(task)
    layer = jnp.int32((task.calls - 1) % task.layers)
    scale = float((bench.KEY_WIDTH + task.spec.rope_width) ** -0.5)
    right = rotated_latent_attention(**operands | {"layer": layer}, scale=scale)
    assert max(bench.errors(task, operands, *right, frequencies(task.spec))) < 1e-6
    still = operands["page_table"].replace(base_position=operands["page_table"].target_position)
    wrong = rotated_latent_attention(**operands | {"layer": layer, "page_table": still}, scale=scale)
    assert min(bench.errors(task, operands, *wrong, frequencies(task.spec))) > 1e-2
    assert np.all(np.isfinite(wrong[0]))


def test_keys_and_hashes_are_timed(tmp_path):
    path = tmp_path / "new" / "result.json"
    bench_keys.main(["--quick", f"--out={path}"])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["op"], row.get("kind")) for row in rows] == [
        ("rotate_keys", "mla"), ("rotate_keys", "gqa"), ("rolling_hashes", None), ("range_fingerprints", None),
    ]  # fmt: skip
    assert [row["key_bytes"] / row["row_bytes"] for row in rows[:2]] == [64 / 576, 1 / 2]
    assert all(row["microseconds"] > 0 for row in rows)


def test_stored_figures_of_keys_and_hashes_are_those_of_their_page():
    stored, page = (DIRECTORY / f"turned_keys_and_hashes{name}" for name in ("_h200.json", ".md"))
    table = bench_keys.table(json.loads(stored.read_text()))
    assert table in page.read_text()
    assert "| mla: 128 of 1152 | 11% | mosaic_gpu |" in table
