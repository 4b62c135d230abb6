"""Tiny random ``transformers`` models and what they compute, as fixtures for the parity tests.

    python tools/parity/write_fixtures.py            write tests/fixtures/parity/*.npz
    python tools/parity/write_fixtures.py --check    compare them with the stored ones; exit code 1 if they differ

Each fixture holds ``config`` (config.json), ``tokens``, ``positions`` (increasing, with gaps), ``logits [T, V]``,
``hidden [L, T, D]`` (the residual stream after each layer) and the weights as published: ``tensors``, a JSON list of
names and shapes, and ``weights``, their values end to end. Weights are values of float16: two bytes each, and exact in
float32. Families register cases in
``tools/parity/families``; this needs torch and transformers (``tools/parity/requirements.txt``).
"""

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
import zlib
from pathlib import Path

import aggregated
import consolidated
import families
import numpy as np
import recurrent
import torch
import transformers
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "parity"
TOKENS = 19
# Written once in float32 by one machine; another's order of summation moves the last bits.
NOISE = 1e-5


def cases() -> dict[str, tuple[str, dict]]:
    """Every case of every module in ``families``."""
    found: dict[str, tuple[str, dict]] = {}
    for module in pkgutil.iter_modules(families.__path__):
        found |= importlib.import_module(f"families.{module.name}").CASES
    return found | recurrent.CASES | aggregated.CASES | consolidated.CASES


def draw_weights(model: torch.nn.Module, draw: np.random.RandomState) -> None:
    """Fills the model with float16 values: products of unit gain, norms around 1, biases that change the routing."""
    for name, tensor in sorted(model.state_dict().items()):
        values = draw.standard_normal(tuple(tensor.shape))
        if name.endswith("norm.weight"):
            values = 1.0 + 0.2 * values
        elif tensor.ndim == 1:
            values = 0.2 * values
        elif "embed_tokens" not in name:
            values = 1.5 * values / np.sqrt(tensor.shape[-1])
        tensor.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float32)))


def published_weights(model: torch.nn.Module, folder: str) -> dict[str, np.ndarray]:
    """The weights by the names a checkpoint has."""
    model.save_pretrained(folder)
    weights: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    return weights


@torch.no_grad()
def fixture(name: str, architecture: str, fields: dict) -> dict[str, np.ndarray]:
    """Everything the parity test of one case needs."""
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    config = getattr(transformers, f"{architecture}Config")(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one wants widths divisible by four
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval()
    draw_weights(model, draw)
    model.tie_weights()
    tokens = draw.randint(0, config.vocab_size, TOKENS)
    positions = np.cumsum(draw.randint(1, 9, TOKENS))
    outputs: list[np.ndarray] = []

    def keep(module, inputs, output):
        outputs.append((output[0] if isinstance(output, tuple) else output)[0].numpy().copy())

    for layer in model.model.layers:
        layer.register_forward_hook(keep)
    # The mask is given because gaps in positions would otherwise be read as packed sequences.
    result = model(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=torch.from_numpy(positions)[None],
        attention_mask=torch.ones(1, TOKENS, dtype=torch.long),
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = published_weights(model, folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
    saved.pop("transformers_version", None)
    flat = np.concatenate([weights[key].reshape(-1) for key in sorted(weights)])
    if not np.array_equal(flat, flat.astype(np.float16)):
        raise ValueError(f"{name}: weights are not exact in float16")
    return {
        "config": np.array(json.dumps(saved, sort_keys=True)),
        "tokens": tokens.astype(np.int32),
        "positions": positions.astype(np.int32),
        "logits": result.logits[0].numpy(),
        "hidden": np.stack(outputs),
        "tensors": np.array(json.dumps([[key, weights[key].shape] for key in sorted(weights)])),
        "weights": flat.astype(np.float16),
    }


def differences(name: str, fresh: dict[str, np.ndarray]) -> list[str]:
    """What is different in the stored fixture, one line each."""
    path = FIXTURES / f"{name}.npz"
    if not path.exists():
        return [f"{name}: no stored fixture"]
    with np.load(path) as stored:
        if set(stored.files) != set(fresh):
            return [f"{name}: arrays differ: {sorted(set(stored.files) ^ set(fresh))}"]
        found = []
        for key, value in fresh.items():
            if value.dtype != np.float32:
                same = np.array_equal(stored[key], value)
            else:
                same = stored[key].shape == value.shape and np.allclose(stored[key], value, atol=NOISE, rtol=NOISE)
            if not same:
                found.append(f"{name}: {key} differs")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored fixtures instead of writing")
    parser.add_argument("--only", default="", help="cases whose name starts with this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    chosen = {name: case for name, case in cases().items() if name.startswith(arguments.only)}
    failed = []
    for name, (architecture, fields) in chosen.items():
        writer = next(
            (own for own in (recurrent, aggregated, consolidated) if name in own.CASES), sys.modules[__name__]
        )
        arrays = writer.fixture(name, architecture, fields)
        if arguments.check:
            failed += differences(name, arrays)
        else:
            FIXTURES.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(FIXTURES / f"{name}.npz", **arrays)
    if not arguments.only:
        known = set(cases())
        failed += [f"{path.stem}: no case writes it" for path in FIXTURES.glob("*.npz") if path.stem not in known]
    for line in failed:
        print(line, file=sys.stderr)
    print(f"{len(chosen)} fixtures {'differ' if failed else 'agree' if arguments.check else 'written'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
