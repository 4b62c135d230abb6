"""Writes the figures of ``pallas_kernels.bench`` into their page: a table beside peers, cost of rotation, a roofline.

    python -m pallas_kernels.bench_page --directory=docs/benchmarks

Reads ``rotated_latent_attention_h200.json``, ``rotated_latent_attention_peers_h200.json`` and, of
``pallas_kernels.bench_rotation``, ``rotation_in_pairs_h200.json`` and, where it is, of ``pallas_kernels.bench_peers``,
``peers_beside_h200.json``, draws ``rotated_latent_attention_roofline.svg`` and replaces what stands between the two
marks of ``rotated_latent_attention.md``; the rest of the page is written by hand.

The floor of a shape is the larger of its bytes (each visible row once) over the copy rate and its operations over the
sustained product rate, both of the same run. Peers were measured on another machine, so their times are scaled by the
ratio of the ceiling that binds the shape.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from pallas_kernels.rotated_latent_attention.arg_specs import ArgSpec

BEGIN, END = "<!-- figures: written by pallas_kernels.bench_page -->", "<!-- end of figures -->"
SHAPE = ("heads", "batch", "query_tokens", "kv_length")

Row = dict[str, Any]
Shape = tuple[int, int, int, int]


def main(argv: list[str] | None = None) -> None:
    """Writes the page and the picture of a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("docs/benchmarks"))
    directory = parser.parse_args(argv).directory
    result, peers = (
        json.loads((directory / f"rotated_latent_attention{kind}_h200.json").read_text()) for kind in ("", "_peers")
    )
    pairs = json.loads((directory / "rotation_in_pairs_h200.json").read_text())
    beside = directory / "peers_beside_h200.json"
    tables = figures(result, peers, pairs, json.loads(beside.read_text()) if beside.exists() else None)
    page = directory / "rotated_latent_attention.md"
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text("".join((before, BEGIN, "\n\n", tables, "\n", END, after)))
    draw(result, directory / "rotated_latent_attention_roofline.svg")


def figures(
    result: dict[str, Any],
    peers: dict[str, Any],
    pairs: dict[str, Any] | None = None,
    beside: dict[str, Any] | None = None,
) -> str:
    """The tables, as Markdown."""
    ceilings = result["ceilings"]
    lines = [
        f"{result['environment']['device']}, JAX {result['environment']['jax']}; ceilings of the run: copy "
        f"{ceilings['copy_gbps']:.0f} GB/s, sustained product {ceilings['matmul_tflops']:.0f} TFLOP/s.",
        "",
        "| H, B, T, L | us | kernel alone | TFLOP/s | GB/s | of the floor | best peer, scaled | peer / ours "
        "| peer / ours without distances | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    peer_times = best_peers(peers, ceilings)
    for shape, rows in by_shape(result).items():
        turning = {row["delta_pattern"]: row for row in rows if _absorbed(row) and row["rotation"]}
        row, plain = turning["every_8_pages"], turning["none"]["microseconds"]
        peer = peer_times.get(shape, float("nan"))
        lines.append(
            f"| {_name(shape)} | {row['microseconds']:.1f} | {row['kernel_microseconds']:.1f} "
            f"| {row['tflops']:.0f} | {row['gbps']:.0f} | {floor(shape, ceilings) / row['microseconds']:.0%} "
            f"| {peer:.1f} | {peer / row['microseconds']:.2f} | {peer / plain:.2f} | {row['relative_error']:.1e} |"
        )
    lines += ["", *rotation_table(result)]
    if pairs is not None:
        lines += ["", *pairs_table(pairs)]
    lines += ["", *expanded_table(result, peer_times)]
    if any(row["storage"] == "unrotated" for row in result["rows"]):
        lines += ["", *unrotated_table(result)]
    if beside is not None:
        lines += ["", *beside_table(beside)]
    return "\n".join(lines) + "\n"


def rotation_table(result: dict[str, Any]) -> list[str]:
    """Time of each pattern over that of the same kernel with rotation compiled out, on the same table."""
    lines = [
        "| H, B, T, L | rotation compiled out, us | every 8 pages | no distance, us | every page, us |",
        "|---|---|---|---|---|",
    ]
    for shape, rows in by_shape(result).items():
        times = {(row["rotation"], row["delta_pattern"]): row["microseconds"] for row in rows if _absorbed(row)}
        without = times.get((False, "every_8_pages"))
        if without:
            lines.append(
                f"| {_name(shape)} | {without:.1f} | {times[True, 'every_8_pages'] / without - 1:+.1%} "
                f"| {times[True, 'none']:.1f} | {times[True, 'every_page']:.1f} |"
            )
    return lines


def pairs_table(pairs: dict[str, Any]) -> list[str]:
    """What rotation costs by calls that alternate; see ``bench_rotation``."""
    lines = [
        "| H, B, T, L | every 8 pages, us | compiled out, us | cost | in single rounds | cost where no distance is |",
        "|---|---|---|---|---|---|",
    ]
    for shape, (row,) in by_shape(pairs).items():
        times, (least, most) = row["microseconds"], row["cost_range"]
        lines.append(
            f"| {_name(shape)} | {times['every_8_pages_rotation']:.1f} | {times['every_8_pages_compiled_out']:.1f} "
            f"| {row['cost']:+.1%} | {least:+.1%} to {most:+.1%} | {row['cost_without_distances']:+.1%} |"
        )
    return lines


def beside_table(beside: dict[str, Any]) -> list[str]:
    """A peer in the same process, calls in turns: times and ratios on the device, ratios by the host's clock."""
    lines = [
        f"| H, B, T, L | {beside['environment']['peer']}, full pages, us | ours, us: full pages, with distances, "
        "part-full with distances | peer / ours on the device, in the same order | by the host's clock |",
        "|---|---|---|---|---|",
    ]
    cases = ("none", "full_every_8_pages", "every_8_pages")
    for shape, (row,) in by_shape(beside).items():
        times = row["device"]["microseconds"]
        ratios = (
            ", ".join(f"{row[clock]['peer_over_ours'][case]:.2f}" for case in cases) if clock in row else "-"
            for clock in ("device", "host_clock")
        )
        ours = ", ".join(f"{times[case]:.1f}" for case in cases)
        lines.append(f"| {_name(shape)} | {times['peer']:.1f} | {ours} | {' | '.join(ratios)} |")
    return lines


def expanded_table(result: dict[str, Any], peer_times: dict[Shape, float]) -> list[str]:
    """Both forms of extends; the expanded one from gathering to attention."""
    lines = ["| H, B, T, L | absorbed, us | expanded, us | best absorbed peer, scaled |", "|---|---|---|---|"]
    for shape, rows in by_shape(result).items():
        times = {
            row["form"]: row["microseconds"]
            for row in rows
            if row["delta_pattern"] == "every_8_pages" and row["rotation"]
        }
        if "expanded" in times:
            lines.append(
                f"| {_name(shape)} | {times['absorbed']:.1f} | {times['expanded']:.1f} "
                f"| {peer_times.get(shape, float('nan')):.1f} |"
            )
    return lines


def unrotated_table(result: dict[str, Any]) -> list[str]:
    """Keys stored before rotation beside keys stored at their first position, without distances or every 8 pages."""
    lines = ["| H, B, T, L | form | keys stored unrotated, us | keys stored rotated, us |", "|---|---|---|---|"]
    for shape, rows in by_shape(result).items():
        for row in rows:
            if row["storage"] == "unrotated":
                pattern = "none" if row["form"] == "absorbed" else "every_8_pages"
                others = (
                    other["microseconds"]
                    for other in rows
                    if (other["form"], other["rotation"], other["delta_pattern"], other["storage"])
                    == (row["form"], True, pattern, "base")
                )
                lines.append(f"| {_name(shape)} | {row['form']} | {row['microseconds']:.1f} | {next(others):.1f} |")
    return lines


def by_shape(result: dict[str, Any]) -> dict[Shape, list[Row]]:
    """Rows under their shape, in the order of the file."""
    shapes: dict[Shape, list[Row]] = {}
    for row in result["rows"]:
        heads, batch, tokens, length = (row[name] for name in SHAPE)
        shapes.setdefault((heads, batch, tokens, length), []).append(row)
    return shapes


def turned(result: dict[str, Any], pattern: str) -> list[tuple[Shape, Row]]:
    """Rows of the absorbed form with rotation and this pattern of distances, each with its shape."""
    return [
        (shape, row)
        for shape, rows in by_shape(result).items()
        for row in rows
        if _absorbed(row) and row["rotation"] and row["delta_pattern"] == pattern
    ]


def floor(shape: Shape, ceilings: dict[str, float]) -> float:
    """Microseconds below which no kernel of the absorbed form gets at these ceilings."""
    return max(_floors(shape, ceilings))


def best_peers(peers: dict[str, Any], ceilings: dict[str, float]) -> dict[Shape, float]:
    """The fastest peer's microseconds per shape, as they would be at ``ceilings``."""
    times = {}
    for shape, (row, *_) in by_shape(peers).items():
        memory, products = _floors(shape, peers["ceilings"])
        ceiling = "copy_gbps" if memory > products else "matmul_tflops"
        fastest = min(time for name, time in row.items() if name not in SHAPE)
        times[shape] = fastest * peers["ceilings"][ceiling] / ceilings[ceiling]
    return times


def finding(result: dict[str, Any]) -> str:
    """How near to the ceilings shapes come that hold more than one token's queries, in two lines."""
    shares = {
        pattern: [
            100 * floor(shape, result["ceilings"]) / row["microseconds"]
            for shape, row in turned(result, pattern)
            if shape[1] * shape[2] > 1
        ]
        for pattern in ("every_8_pages", "every_page")
    }
    spans, pages = (f"{min(found):.0f} to {max(found):.0f} %" for found in shares.values())
    return (
        f"More than one token's queries reach {spans} of the ceilings with a new distance\n"
        f"every 8 pages, {pages} with one for every page"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Rate over operations a byte, on logarithmic axes, under the two ceilings of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ceilings = result["ceilings"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    ridge = 1e3 * ceilings["matmul_tflops"] / ceilings["copy_gbps"]
    intensities = [16, ridge, 2**18]
    roof = [min(ceilings["matmul_tflops"], intensity * ceilings["copy_gbps"] * 1e-3) for intensity in intensities]
    axes.plot(intensities, roof, color="black", linewidth=1, label="ceilings of the run")
    for heads, marker, color in ((16, "o", "C0"), (64, "s", "C1"), (128, "^", "C2")):
        for pattern, fill, label in (("every_8_pages", "full", f"{heads} heads"), ("every_page", "none", "")):
            points = [
                (_spec(shape).flops / _spec(shape).row_bytes, row["tflops"])
                for shape, row in turned(result, pattern)
                if shape[0] == heads
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=color, fillstyle=fill, label=label or None)
    axes.plot([], [], "o", color="gray", fillstyle="none", label="hollow: every page its own distance")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of cached rows", ylabel="TFLOP/s")
    axes.set_title(finding(result), loc="left", fontsize="medium")
    axes.legend(frameon=False)
    # The same figures give the same file: no date, no random names.
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _absorbed(row: Row) -> bool:
    return row["form"] == "absorbed" and row["storage"] == "base"


def _name(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def _spec(shape: Shape) -> ArgSpec:
    heads, batch, tokens, length = shape
    return ArgSpec(heads, batch, tokens, length)


def _floors(shape: Shape, ceilings: dict[str, float]) -> tuple[float, float]:
    """Microseconds to move the rows once, and to do the products."""
    spec = _spec(shape)
    return spec.row_bytes / ceilings["copy_gbps"] * 1e-3, spec.flops / ceilings["matmul_tflops"] * 1e-6


if __name__ == "__main__":
    main()
