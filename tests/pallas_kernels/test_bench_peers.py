"""What is made of rounds beside a peer; the peer itself needs a GPU."""

from pallas_kernels import bench_page, bench_peers
from pallas_kernels.rotated_latent_attention.arg_specs import ArgSpec

CASES = ("every_8_pages", "full_every_8_pages", "none", "peer")


def test_says_what_is_missing(monkeypatch, capsys, tmp_path):
    if not bench_peers.MISSING:
        monkeypatch.setattr(bench_peers, "MISSING", "No module named 'flash_mla'")
    assert bench_peers.main([f"--out={tmp_path / 'result.json'}"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("bench_peers needs PyTorch and FlashMLA, which cannot be imported here: No module named")
    assert len(message.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_ratio_is_the_median_of_ratios_within_rounds():
    """Clocks that drift from round to round do not enter it, where medians of times would let them."""
    host = [(100.0, 120.0, 110.0, 100.0), (40.0, 40.0, 40.0, 20.0), (50.0, 60.0, 55.0, 44.0)]
    rounds = [
        {"host_clock": dict(zip(CASES, times, strict=True)), "device": dict.fromkeys(CASES, 2.0)} for times in host
    ]
    row = bench_peers.row_of(ArgSpec(64, 3, 1, 70), rounds)
    assert (row["heads"], row["batch"], row["query_tokens"], row["kv_length"], row["rounds"]) == (64, 3, 1, 70, 3)
    assert row["host_clock"] == {
        "microseconds": {"every_8_pages": 50.0, "full_every_8_pages": 60.0, "none": 55.0, "peer": 44.0},
        "peer_over_ours": {"every_8_pages": 0.88, "full_every_8_pages": 0.7333, "none": 0.8},
        "range": {"every_8_pages": [0.5, 1.0], "full_every_8_pages": [0.5, 0.8333], "none": [0.5, 0.9091]},
    }
    assert row["device"]["peer_over_ours"] == dict.fromkeys(CASES[:-1], 1.0)
    row["device"] = bench_peers.row_of(ArgSpec(64, 3, 1, 70), [{"device": rounds[0]["host_clock"]}])["device"]
    alone = {name: value for name, value in row.items() if name != "host_clock"} | {"batch": 5}
    table = bench_page.beside_table({"environment": {"peer": "flash_mla 1"}, "rows": [row, alone]})
    assert table[-2:] == [
        "| 64, 3, 1, 70 | 100.0 | 110.0, 120.0, 100.0 | 0.91, 0.83, 1.00 | 0.80, 0.73, 0.88 |",
        "| 64, 5, 1, 70 | 100.0 | 110.0, 120.0, 100.0 | 0.91, 0.83, 1.00 | - |",
    ]


def test_full_pages_have_as_many_distances_and_every_row():
    spec = ArgSpec(2, 2, 1, 1024, latent_width=8, rope_width=2)
    tables = bench_peers.tables_of(bench_peers.Task(spec, "absorbed", True, bench_peers.PATTERNS))
    full, plain = tables["full_every_8_pages"], tables["none"]
    assert (full.row_end - full.row_begin).sum() == 2 * 1024
    assert (full.page_id == plain.page_id).all()
    assert (plain.base_position == plain.target_position).all()
    distances = (full.base_position - full.target_position)[0, :16]
    assert [len(set(distances[start : start + 8].tolist())) for start in (0, 8)] == [1, 1]
    assert 0 not in distances
    assert distances[0] != distances[8]
