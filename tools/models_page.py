"""The table of models in ``docs/models.md``: what each keeps a token, what may be reused, and how far it is from
``transformers``.

    python -m tools.models_page           run every parity fixture and write the page
    python -m tools.models_page --check   say whether the page fits the code; errors are taken as they stand

Everything but the errors is read from configs and presets, so a page that no longer fits is a failing test
(``tests/models/test_models_page.py``).
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from irminsul.row_quantisation import bytes_per_token
from models import families, recurrent
from models.chat_format import FORMATS
from models.families import REFUSED
from models.variants import CONVERTED, VARIANTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
FIXTURES = ROOT / "tests" / "fixtures" / "parity"
TRANSFORMERS = "5.23"
BEGIN, END = "<!-- TABLE BEGIN: written by python -m tools.models_page -->", "<!-- TABLE END -->"
# A published model of each type; the fields of the row are its own.
PUBLISHED = {
    "deepseek_v2": ("deepseek-v2", "deepseek-v2-lite"),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "moonlight-16b-a3b"),
    "kimi_k2": ("kimi-k2",),
    "joyai_llm_flash": ("joyai-llm-flash",),
    "deepseek_v32": ("deepseek-v3.2",),
    "glm_moe_dsa": ("glm-5",),
    "glm4_moe_lite": ("glm-4.7-flash",),
    "mistral4": ("mistral-small-4",),
    "mistral_large_3": ("mistral-large-3",),
    "minicpm3": ("minicpm3-4b",),
    "youtu": ("youtu-llm-2b",),
    "longcat_flash": ("longcat-flash",),
    "llama": ("smollm2-135m", "irminsul-mini-gqa"),
}
# Types with recurrent layers that are served.
RECURRENT = {
    "kimi_linear": ("kimi-linear-48b-a3b",),
    "mamba2": ("mamba2-1.3b", "mamba2-2.7b"),
    "qwen3_next": ("qwen3-next-80b-a3b", "qwen3-next-41b-a3b"),
}
# Of these parity is that of another type: they differ in name alone, or in nothing that is computed.
SAME_PROGRAM = {"kimi_k2": "deepseek_v3", "joyai_llm_flash": "deepseek_v3"}


def parity_errors() -> dict[str, tuple[float, float]]:
    """Largest absolute difference of the residual stream and of the logits, by model type, over its fixtures."""
    from tests.models import test_gqa_parity, test_parity, test_recurrent_parity

    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(set(FIXTURES.glob("*.npz")) - set(FIXTURES.glob("aggregated*"))):
        arrays = np.load(path)
        model_type = json.loads(str(arrays["config"]))["model_type"]
        if path in test_recurrent_parity.FIXTURES:
            model, arrays, _ = test_recurrent_parity.load_fixture(path)
            logits, hidden = test_recurrent_parity.run(model, arrays["tokens"])
            states, expected = np.asarray(hidden), arrays["hidden"][-1]
        else:
            model, arrays = test_parity.load_fixture(path)
            if path in test_gqa_parity.FIXTURES:
                logits, states = test_gqa_parity.run(model, arrays["tokens"], arrays["positions"])
            else:
                states, logits = test_parity.run(model, arrays["tokens"], arrays["positions"])
            expected = arrays["hidden"]
        errors = np.abs(states - expected).max(), np.abs(logits - arrays["logits"]).max()
        found.setdefault(model_type, []).append((float(errors[0]), float(errors[1])))
    return {name: (max(e[0] for e in errors), max(e[1] for e in errors)) for name, errors in found.items()}


def rows_a_token(form: families.RowFormat) -> str:
    """How many rows one token has in the cache."""
    text = f"{form.num_layers} {'latents' if form.kind == 'latent' else 'keys and values'}"
    return text + (f", {form.index_layers} indexer keys" if form.index_layers else "")


def cached(form: families.RowFormat) -> str:
    """What one layer keeps of a token."""
    layout = "interleaved" if form.interleaved else "half-split"
    if form.kind == "grouped":
        width = form.rope_width // form.rope_heads
        return f"{form.rope_heads} keys of {width} rotated, {layout}; as many values"
    text = f"`c_kv` {form.latent_width} without position; `k_r` {form.rope_width} rotated, {layout}"
    if form.index_layers:
        layout = "interleaved" if form.index_interleaved else "half-split"
        text += f"; indexer key {form.index_width}, its first {form.rope_width} rotated, {layout}"
    return text


def reuse(config: Any, form: families.RowFormat) -> str:
    """What may be served from the cache and why."""
    if form.kind == "grouped":
        return "exact; shifted, keys turned by R(δ)"
    notes = ["exact; shifted, `k_r` turned by R(δ)"]
    if form.index_layers:
        notes.append("the indexer key too, in its own layout, before it is ranked; the choice itself is never kept")
    if config.rope_parameters.llama_4_scaling_beta:
        notes.append("queries alone grow with position, so no row holds it")
    if config.rope_parameters.rope_type == "longrope":
        notes.append("LongRoPE's factors are the same for short and long prompts; refused where they are not")
    if config.mla_scale_kv_lora:
        notes.append("the latent is kept with its constant gain; two attentions a published layer")
    return "; ".join(notes)


def recurrent_memory(preset: str) -> tuple[str, int, str]:
    """Of a model with recurrent layers: rows of a token and their bytes in bfloat16, and what a snapshot holds."""
    family, config = recurrent.read_config(preset)
    kinds = [family.kind(config, layer) for layer in range(config.num_hidden_layers)]

    def size(layers: list[str]) -> int:
        kept = jax.eval_shape(lambda: [family.empty(config, kind, 1, 1, jnp.bfloat16) for kind in layers])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))

    attention = [kind for kind in kinds if kind.startswith("attention")]
    memories = [kind for kind in kinds if not kind.startswith("attention")]
    form = "latents" if hasattr(config, "kv_lora_rank") else "keys and values"
    rows = f"{len(attention)} {form}" if attention else "none"
    return rows, size(attention), f"the memories of {len(memories)} layers, {size(memories) / 1e6:.1f} MB"


def table(errors: dict[str, tuple[str, str]]) -> str:
    """The page's tables, given the errors of each model type as they are to be printed."""
    columns = ("`model_type`", "presets", "residual stream", "logits", "rows", "bytes", "one layer keeps", "reuse")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model_type, presets in PUBLISHED.items():
        family, config = families.read_config(presets[0])
        form = family.row_format(config)
        stream, logits = errors.get(SAME_PROGRAM.get(model_type, model_type), ("none", "none"))
        size = bytes_per_token(form, "bfloat16")
        lines.append(
            f"| `{model_type}` | {', '.join(presets)} | {stream} | {logits} | {rows_a_token(form)} | {size:,} | "
            f"{cached(form)} | {reuse(config, form)} |"
        )
    columns = (*columns[:6], "a snapshot of a sequence", "reuse")
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model_type, presets in RECURRENT.items():
        stream, logits = errors.get(model_type, ("none", "none"))
        rows, size, snapshot = recurrent_memory(presets[0])
        lines.append(
            f"| `{model_type}` | {', '.join(presets)} | {stream} | {logits} | {rows} | {size:,} | {snapshot} | exact "
            f"prefixes, from snapshots of the state; not shifted: {REFUSED[model_type]} |"
        )
    lines += ["", "| `model_type` | residual stream | logits | reuse |", "|---|---|---|---|"]
    for model_type, reason in sorted(REFUSED.items()):
        if model_type not in RECURRENT:
            lines.append(f"| `{model_type}` | none | none | refused by name; not shifted: {reason} |")
    return "\n".join(lines)


def errors_on(page: str) -> dict[str, tuple[str, str]]:
    """The errors a page states, by model type."""
    found = re.findall(r"^\| `(\w+)` \|(?: [^|`]+ \|)? (none|[\d.e-]+) \| (none|[\d.e-]+) \|", page, re.MULTILINE)
    return {name: (stream, logits) for name, stream, logits in found}


def rendered(page: str, errors: dict[str, tuple[str, str]]) -> str:
    """The page with its tables written anew."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(errors)}\n{END}{rest.split(END)[1]}"


def undocumented() -> set[str]:
    """Model types the code knows and the page would leave out."""
    served = {name for family in families.families() for name in family.model_types}
    listed = set(PUBLISHED) | {"qwen2", "qwen3", "mistral", CONVERTED}
    recurrent_types = {name for family in recurrent.recurrent_families() for name in family.model_types}
    return ((served | set(VARIANTS) | set(FORMATS)) - listed) | (recurrent_types ^ set(RECURRENT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page fits")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    if arguments.check:
        fits = rendered(page, errors_on(page)) == page and not undocumented()
        print(f"{PAGE.name} {'fits' if fits else 'does not fit; run python -m tools.models_page'}")
        return 0 if fits else 1
    errors = {name: (f"{pair[0]:.0e}", f"{pair[1]:.0e}") for name, pair in parity_errors().items()}
    PAGE.write_text(rendered(page, errors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
