"""How far reused runs of agent sessions have moved, and how much of them lies in whole windows of an aggregated layer.

A shifted run can be served by entries kept at every phase where the prompt's windows lie inside it, and by entries as
the model computes them only if it has also moved by a multiple of the stride.
"""

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.recovery_survey import plan_only_engine
from experiments.traffic.generator import SCENARIOS, SessionShape, generate_session
from experiments.traffic.tokenization import Encoder, load_tokenizer
from irminsul.page_tree import PageTree
from irminsul.plan import ReusePlan
from irminsul.prefill import complete, prefill


def shifted_runs(tree: PageTree, plan: ReusePlan) -> list[tuple[int, int, int]]:
    """``(begin, end, move)`` of every longest run of shifted tokens that have moved alike."""
    runs: list[tuple[int, int, int]] = []
    for span in plan.spans:
        if span.exact or span.computed:
            continue
        for piece in span.pieces:
            length = piece.row_end - piece.row_begin
            move = piece.position - int(tree.base_position[piece.page]) - piece.row_begin
            if runs and runs[-1][1] == piece.position and runs[-1][2] == move:
                runs[-1] = (runs[-1][0], piece.position + length, move)
            else:
                runs.append((piece.position, piece.position + length, move))
    return runs


def whole_windows(begin: int, end: int, stride: int) -> int:
    """Tokens of ``[begin, end)`` in windows that lie inside."""
    return max(0, end // stride - -(-begin // stride)) * stride


def measure(config: ConfigDict) -> list[dict[str, Any]]:
    """Shifted tokens of generated sessions by scenario, and what of them each stride could serve."""
    encoder = Encoder(load_tokenizer(config.tokenizer))
    rows = []
    for scenario in SCENARIOS:
        shape = SessionShape(scenario, config.turns, config.prompt_tokens)
        runs: list[tuple[int, int, int]] = []
        for session in range(config.sessions):
            engine = plan_only_engine("irminsul", 4096)
            cache = engine.cache
            for request in generate_session(shape, encoder, session):
                response = encoder.response(request)
                result = prefill(None, cache, encoder.prompt(request), engine.policy, new_tokens=len(response))
                runs += shifted_runs(result.cache.tree, result.request.plan)
                cache = complete(result.cache, result.request, response)
        rows.append({"what": "traffic", "scenario": scenario, "shifted": sum(end - begin for begin, end, _ in runs)})
        for kind in ("sparse", "heavy"):
            stride = getattr(config, f"{kind}_stride")
            whole = np.array([whole_windows(begin, end, stride) for begin, end, _ in runs] or [0])
            alike = np.array([move % stride == 0 for _, _, move in runs] or [False])
            rows[-1] |= {f"{kind}_whole": int(whole.sum()), f"{kind}_aligned": int(whole[alike].sum())}
    return rows


def table(config: ConfigDict, rows: list[dict[str, Any]]) -> str:
    """Shares of the shifted tokens, by scenario."""
    sparse, heavy = config.sparse_stride, config.heavy_stride
    lines = [
        f"| scenario | shifted tokens | in whole windows of {sparse} | and moved by a multiple of {sparse} | in whole "
        f"windows of {heavy} | and moved by a multiple of {heavy} |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        names = ("sparse_whole", "sparse_aligned", "heavy_whole", "heavy_aligned")
        shares = [f"{row[name] / row['shifted']:.1%}" if row["shifted"] else "-" for name in names]
        lines.append(f"| {row['scenario']} | {row['shifted']:,} | {' | '.join(shares)} |")
    return "\n".join(lines)
