"""``irminsul models``: which there are, what one needs, GQA checkpoints as MLA, and the check a cache depends on."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import flags

import models
from command_line.command import DONE, FOUND_WANTING, Command, add_dtype, exactly, own_flags, print_json, take_action
from experiments import report, subjects
from experiments.errors import InputError
from irminsul.cache import CacheConfig
from irminsul.rope import RotationError, check_rotation
from irminsul.row_quantisation import ROW_DTYPES, bytes_per_token
from models import checkpoint, convert, families, pretrained, smollm2
from models.device_plan import device_plan
from models.families import Family, Model
from models.safetensors_reader import read_json

PAGE_ROWS = 64
CALIBRATION_COUNT, CALIBRATION_LENGTH = 8, 4096


def config_of(name: str) -> tuple[Family, Any]:
    """Family and config of a preset, a checkpoint of the project, or a folder with ``config.json``, without weights.

    Raises:
      InputError: if there is none, or its config is unsupported, with the reason.
    """
    source = _source(name)
    if source == name and name not in models.presets():
        known = ", ".join(sorted({*models.presets(), *pretrained.names()}))
        raise InputError(f"model={name!r} is no preset, no checkpoint and no folder with config.json; known: {known}")
    try:
        return families.read_config(source)
    except (ValueError, OSError) as error:
        raise InputError(f"model={name}: {error}") from error


def _source(name: str) -> str | dict[str, Any]:
    """The fields of a ``config.json``, if ``name`` is a folder with one or a checkpoint of the project; else itself.

    Raises:
      InputError: if the file cannot be read.
    """
    folder = next((path for path in (Path(name), pretrained.FOLDER / name) if (path / "config.json").is_file()), None)
    try:
        return name if folder is None else read_json(folder / "config.json")
    except (ValueError, OSError) as error:
        raise InputError(f"model={name}: {error}") from error


def memory_plan(name: str, *, dtype: str, row_dtype: str, memory_gib: float, tokens: int) -> dict[str, Any]:
    """What a model and its cache take: bytes of weights, of a token's rows over all layers, and what memory then holds.

    ``memory_gib`` 0 asks for nothing beyond ``tokens``. Activations and compiled programs are not counted.
    """
    family, config = config_of(name)
    row = family.row_format(config)
    parameters = families.parameter_count(families.abstract(family, config, dtype))
    token_bytes = bytes_per_token(row, row_dtype)
    weights = parameters * jnp.dtype(dtype).itemsize
    plan = {
        "model": name,
        "kind": row.kind,
        "layers": row.num_layers,
        "parameters": parameters,
        "weight_bytes": weights,
        "row_width": row.latent_width + row.rope_width,
        "turned_width": row.rope_width,
        "cache_bytes_per_token": token_bytes,
        "cache_bytes": token_bytes * tokens,
        "pages": -(-tokens // PAGE_ROWS),
        "longest_context": config.max_position_embeddings,
    }
    if memory_gib:
        plan["tokens_that_fit"] = max(0, int((memory_gib * 2**30 - weights) // token_bytes))
    return plan


def mesh_plan(name: str, mesh: str, *, dtype: str, row_dtype: str, memory_gib: float) -> dict[str, Any]:
    """What a model takes on devices arranged along named axes, such as ``tensor=8,expert=4``.

    Raises:
      InputError: for axes that are no such list or do not divide the model, rows in eight bits, or without a device's
        memory.
    """
    if row_dtype == "int8":
        raise InputError("row_dtype=int8: rows in eight bits have scales, which no mesh is planned with; use bfloat16")
    if memory_gib <= 0:
        raise InputError(f"mesh={mesh}: --memory_gib is missing, the memory of one device")
    source = _source(name)
    try:
        axes = {axis: int(count) for axis, count in (part.split("=") for part in mesh.split(","))}
        plan = device_plan(source, axes, memory_bytes=int(memory_gib * 2**30), dtype=dtype, row_dtype=row_dtype)
    except ValueError as error:
        raise InputError(f"mesh={mesh}: {error}; give axes as tensor=8,expert=4") from error
    return {"mesh": axes, **dataclasses.asdict(plan)}


def _list(arguments: list[str], values: flags.FlagValues) -> int:
    exactly(arguments, "")
    rows: list[dict[str, Any]] = []
    for name in sorted({*models.presets(), *pretrained.names(), *subjects.SMOLLM2}):
        state = "weights here" if name in pretrained.names() else "shape only"
        if name in subjects.SMOLLM2:
            state = "weights here" if _installed() else "weights in the extra smollm2"
        if name == smollm2.MLA_NAME:
            rows.append({"model": name, "kind": "latent", "layers": 30, "parameters": None, "weights": state})
            continue
        family, config = config_of(name)
        parameters = families.parameter_count(families.abstract(family, config))
        row = family.row_format(config)
        rows.append({"model": name, "kind": row.kind, "layers": row.num_layers, "parameters": parameters,
                     "weights": state})  # fmt: skip
    if values.json:
        print_json(rows)
    else:
        shown = [row | {"parameters": _millions(row["parameters"])} for row in rows]
        cells = [[row[name] for name in ("model", "kind", "layers", "parameters", "weights")] for row in shown]
        print(report.markdown_table(("model", "rows", "layers", "parameters", "weights"), cells))
    return DONE


def _installed() -> bool:
    try:
        return smollm2.gguf_path().is_file()
    except ModuleNotFoundError:
        return False


def _millions(count: int | None) -> str:
    if count is None:
        return "as its original"
    return f"{count / 1e9:,.1f} G" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _plan(arguments: list[str], values: flags.FlagValues) -> int:
    (name,) = exactly(arguments, "MODEL")
    sizes = {"dtype": values.dtype, "row_dtype": values.row_dtype or values.dtype}
    plan = memory_plan(name, memory_gib=values.memory_gib, tokens=values.tokens, **sizes)
    if values.mesh:
        plan |= mesh_plan(name, values.mesh, memory_gib=values.memory_gib, **sizes)
    if values.json:
        print_json(plan)
        return DONE
    turned = plan["turned_width"] / plan["row_width"]
    weights, rows = plan["weight_bytes"] / 2**30, plan["cache_bytes"] / 2**30
    print(f"{name}: {_millions(plan['parameters'])} parameters, {weights:,.2f} GiB as {values.dtype}")
    print(
        f"a token's rows: {plan['cache_bytes_per_token']:,} bytes over {plan['layers']} layers; a moved token has "
        f"{turned:.0%} of each row turned"
    )
    print(f"{values.tokens:,} tokens: {rows:,.2f} GiB, {plan['pages']:,} pages of {PAGE_ROWS} rows")
    if values.mesh:
        sent = sum(plan["collective_bytes_per_token"].values())
        print(
            f"on {values.mesh}: {plan['parameter_bytes_per_device'] / 2**30:,.2f} GiB of weights a device, and "
            f"{plan['cache_tokens']:,} tokens beside them; a computed token sends {sent:,} bytes from each device"
        )
    elif weights > values.memory_gib > 0:
        print(f"{values.memory_gib:g} GiB do not hold the weights; name several devices by --mesh")
    elif "tokens_that_fit" in plan:
        print(f"{values.memory_gib:g} GiB hold the weights and {plan['tokens_that_fit']:,} tokens")
    return DONE


def _load(name: str, dtype: str) -> Model:
    try:
        return models.load(name, dtype)
    except (ValueError, OSError, ImportError) as error:
        raise InputError(f"model={name}: {error}") from error


def _self_test(arguments: list[str], values: flags.FlagValues) -> int:
    (name,) = exactly(arguments, "MODEL")
    model = _load(name, values.dtype)
    config = CacheConfig(num_pages=16, max_prompt_tokens=256, max_new_tokens=0, dtype=values.row_dtype or values.dtype)
    found: dict[str, Any] = {"model": name, "digest": model.digest, "row_format": dataclasses.asdict(model.row_format)}
    try:
        found |= {"difference": check_rotation(model, config), "passed": True}
    except RotationError as error:
        found |= {"passed": False, "reason": str(error)}
    if values.json:
        print_json(found)
    elif found["passed"]:
        print(f"{name}: rows can be moved; moved and fresh ones differ by {found['difference']:.1e}")
    else:
        print(f"{name}: {found['reason']}")
    return DONE if found["passed"] else FOUND_WANTING


def _convert(arguments: list[str], values: flags.FlagValues) -> int:
    (name,) = exactly(arguments, "MODEL")
    if not values.out:
        raise InputError("--out=DIR is missing: where config.json and the converted weights go")
    if values.rope_width % 2:  # what else may be wrong is known once the calibration has run
        raise InputError(f"rope_width={values.rope_width} must be even")
    subject = subjects.subject(name)
    rope_width, rank = values.rope_width or None, values.rank or None
    try:
        statistics = None if values.method == "lossless" else _calibrate(subject, values.calibration)
        conversion = convert.convert(subject.model, statistics, method=values.method, rope_width=rope_width, rank=rank)
        converted = convert.apply(subject.model, conversion)
        checkpoint.save_safetensors(converted, values.out)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    before, after = subject.model.row_format, converted.row_format
    widths = [row.latent_width + row.rope_width for row in (before, after)]
    found = {
        "model": name,
        "method": values.method,
        "row_width_before": widths[0],
        "row_width_after": widths[1],
        "turned_before": before.rope_width,
        "turned_after": after.rope_width,
    }
    if values.json:
        print_json(found)
    else:
        print(
            f"{values.out}: {name} as MLA by {values.method}; rows {widths[0]} to {widths[1]} values a layer, of which "
            f"{before.rope_width} to {after.rope_width} are turned. Without training the answers change unless the "
            "method is lossless: see docs/how-to/convert-a-checkpoint.md"
        )
    return DONE


def _calibrate(subject: subjects.Subject, text: str) -> convert.Statistics:
    documents, _ = subjects.documents(text)
    length = min(CALIBRATION_LENGTH, subject.model.max_position)
    blocks = convert.token_blocks(documents, subject.encode, length, subject.bos, CALIBRATION_COUNT)
    return convert.calibrate(subject.model, blocks)


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    actions = {"list": _list, "plan": _plan, "convert": _convert, "self-test": _self_test}
    return take_action(arguments, values, actions)


def _flags() -> flags.FlagValues:
    values = own_flags()
    add_dtype(values, "of weights and arithmetic")
    rows = "of cached rows; that of the weights if none is named"
    flags.DEFINE_enum("row_dtype", None, ROW_DTYPES, rows, flag_values=values)
    flags.DEFINE_integer("tokens", 100_000, "plan: tokens to keep", lower_bound=1, flag_values=values)
    flags.DEFINE_float(
        "memory_gib", 0.0, "plan: device memory; 0: do not say what fits", lower_bound=0.0, flag_values=values
    )
    axes = "plan: devices along tensor, expert, sequence and data, such as tensor=8"
    flags.DEFINE_string("mesh", "", axes, flag_values=values)
    flags.DEFINE_string("out", "", "convert: folder of the converted checkpoint", flag_values=values)
    flags.DEFINE_enum("method", "query_weighted", convert.METHODS, "convert: how slots are chosen", flag_values=values)
    flags.DEFINE_integer("rope_width", 0, "convert: of the rotary key; 0: one head's width", flag_values=values)
    flags.DEFINE_integer("rank", 0, "convert: of the latent; 0: all that is not rotary", flag_values=values)
    calibration = "convert: text to calibrate on: heldout, library, or a path"
    flags.DEFINE_string("calibration", "heldout", calibration, flag_values=values)
    return values


COMMAND = Command(
    "models",
    "list, plan, convert and check models",
    "list [--json]\n"
    "plan MODEL [--dtype=bfloat16] [--tokens=N] [--memory_gib=N] [--mesh=AXIS=N,...]\n"
    "convert MODEL --out=DIR [--method=NAME] [--rope_width=N] [--rank=N]\n"
    "self-test MODEL [--dtype=float32]",
    (
        "irminsul models list",
        "irminsul models plan deepseek-v2-lite --dtype=bfloat16 --memory_gib=141",
        "irminsul models plan deepseek-v3 --dtype=bfloat16 --memory_gib=141 --mesh=tensor=4,expert=4",
        "irminsul models convert irminsul-mini-gqa --method=lossless --out=converted",
        "irminsul models self-test irminsul-mini-mla",
    ),
    _run,
    _flags,
)
