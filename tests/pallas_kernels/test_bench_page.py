"""The page of the benchmark says what its JSON says."""

import json
from pathlib import Path

import pytest

from pallas_kernels import bench_page, bench_rotation
from pallas_kernels.rotated_latent_attention.arg_specs import ArgSpec

CEILINGS = {"copy_gbps": 4000.0, "matmul_tflops": 500.0}
DIRECTORY = Path(__file__).parents[2] / "docs" / "benchmarks"


def row(shape, microseconds, pattern="every_8_pages", rotation=True, form="absorbed", storage="base"):
    return {
        **dict(zip(bench_page.SHAPE, shape, strict=True)), "form": form, "rotation": rotation, "delta_pattern": pattern,
        "storage": storage, "microseconds": microseconds, "kernel_microseconds": microseconds - 1, "tflops": 100.0,
        "gbps": 1000.0, "relative_error": 2e-3,
    }  # fmt: skip


DECODE, EXTEND = (16, 64, 1, 4096), (128, 1, 1024, 33792)
RESULT = {
    "environment": {"device": "NVIDIA H200", "jax": "0.11.2"},
    "ceilings": CEILINGS,
    "rows": [
        row(DECODE, 101.0),
        row(DECODE, 99.0, "none"),
        row(DECODE, 123.0, "every_page"),
        row(DECODE, 100.0, rotation=False),
        row(EXTEND, 20000.0),
        row(EXTEND, 19000.0, "none"),
        row(EXTEND, 5000.0, form="expanded"),
        row(EXTEND, 5500.0, "none", form="expanded", storage="unrotated"),
    ],
}
PEERS = {
    "ceilings": {"copy_gbps": 4400.0, "matmul_tflops": 600.0},
    "rows": [dict(zip(bench_page.SHAPE, shape, strict=True)) | times for shape, times in (
        (DECODE, {"A": 90.0, "B": 80.0}), (EXTEND, {"A": 15000.0}))],
}  # fmt: skip


def test_peers_are_scaled_by_the_ceiling_that_binds():
    peers = bench_page.best_peers(PEERS, CEILINGS)
    assert peers == pytest.approx({DECODE: 80.0 * 4400 / 4000, EXTEND: 15000.0 * 600 / 500})


def test_floor_is_the_larger_of_bytes_and_products():
    rows_once = 64 * 4096 * 576 * 2
    assert bench_page.floor(DECODE, CEILINGS) == pytest.approx(rows_once / 4e12 * 1e6)
    assert bench_page.floor(DECODE, {**CEILINGS, "matmul_tflops": 50.0}) > bench_page.floor(DECODE, CEILINGS)


def test_tables_state_ratios():
    text = bench_page.figures(RESULT, PEERS)
    assert "| 16, 64, 1, 4096 | 101.0 | 100.0 | 100 | 1000 | 75% | 88.0 | 0.87 | 0.89 | 2.0e-03 |" in text
    assert "| 16, 64, 1, 4096 | 100.0 | +1.0% | 99.0 | 123.0 |" in text
    assert "| 128, 1, 1024, 33792 | 20000.0 | 5000.0 | 18000.0 |" in text
    # No row without rotation to compare with, no expanded form: not in those tables.
    assert "| 128, 1, 1024, 33792 | expanded | 5500.0 | 5000.0 |" in text
    assert text.count("128, 1, 1024, 33792") == 3 == 1 + text.count("16, 64, 1, 4096")


def test_page_is_written_between_its_marks(tmp_path):
    for name, content in (("", RESULT), ("_peers", PEERS)):
        (tmp_path / f"rotated_latent_attention{name}_h200.json").write_text(json.dumps(content))
    (tmp_path / "rotation_in_pairs_h200.json").write_text(json.dumps({"rows": []}))
    page, picture = tmp_path / "rotated_latent_attention.md", tmp_path / "rotated_latent_attention_roofline.svg"
    page.write_text(f"before\n{bench_page.BEGIN}\nold\n{bench_page.END}\nafter\n")
    drawn = []
    for _ in range(2):
        bench_page.main([f"--directory={tmp_path}"])
        drawn.append((page.read_text(), picture.read_text()))
    assert drawn[0] == drawn[1]
    assert drawn[0][0].startswith("before\n")
    assert drawn[0][0].endswith("after\n")
    assert "old" not in drawn[0][0]


def test_stored_figures_are_those_of_the_page():
    """Whoever stores a new run writes the page anew."""
    stored = DIRECTORY / "rotated_latent_attention_h200.json"
    if not stored.exists():
        pytest.skip("no run is stored")
    peers = json.loads((DIRECTORY / "rotated_latent_attention_peers_h200.json").read_text())
    pairs = json.loads((DIRECTORY / "rotation_in_pairs_h200.json").read_text())
    path = DIRECTORY / "peers_beside_h200.json"
    beside = json.loads(path.read_text()) if path.exists() else None
    assert (
        bench_page.figures(json.loads(stored.read_text()), peers, pairs, beside)
        in (DIRECTORY / "rotated_latent_attention.md").read_text()
    )


def test_a_cost_is_the_median_of_ratios_within_rounds():
    """Clocks that drift from round to round do not enter it, where medians of times would let them."""
    pages = [(200.0, 100.0), (33.0, 30.0), (55.0, 50.0)]
    names = ("every_8_pages_rotation", "every_8_pages_compiled_out", "none_rotation", "none_compiled_out")
    rounds = [dict(zip(names, (*pair, 51.0, 50.0), strict=True)) for pair in pages]
    row = bench_rotation.row_of(ArgSpec(64, 3, 1, 70), rounds)
    assert (row["cost"], row["cost_range"], row["cost_without_distances"]) == (0.1, [0.1, 1.0], 0.02)
    assert row["microseconds"]["every_8_pages_rotation"] == 55.0
    assert "| 64, 3, 1, 70 | 55.0 | 50.0 | +10.0% | +10.0% to +100.0% | +2.0% |" in bench_page.pairs_table(
        {"rows": [row]}
    )
