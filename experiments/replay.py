"""Replays sessions under one or several policies: per turn, where every token came from and what it took.

All policies go through the same engine, each with a cache of its own, turn by turn side by side. Where there is a
model, the next-token distributions after the prompt and after each of the first ``forced_steps`` tokens of the response
are compared with those of full prefill. The response is teacher-forced; where a request has none, full prefill's own
greedy continuation takes its place.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict
from tqdm import tqdm

import models
from experiments import replay_report, report
from experiments.divergence import divergence
from experiments.errors import InputError
from experiments.names import listed
from experiments.rows import RowLog
from experiments.table import LiveTable
from experiments.traffic.session import Request
from experiments.traffic.source import Traffic, pretrained, read_traffic
from experiments.traffic.tokenization import Encoder
from experiments.upper_bound import SeenWindows
from irminsul.cache import CacheConfig
from irminsul.compilation import count_compilations
from irminsul.policies import get_policy

# A model small enough to replay long prompts on two cores, with room for any vocabulary and 64k positions.
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 2,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 65536,
}


@dataclasses.dataclass
class Lane:
    """One policy with its engine and cache."""

    policy: str
    engine: Any
    computes: bool


def run(config: ConfigDict, out: Path, create_engine: Callable[..., Any] | None = None) -> report.StudyResult:
    """Replays ``config``'s traffic; ``create_engine`` stands in for ``irminsul.engine.Engine.create``.

    Raises:
      InputError: for a setting that cannot be followed, naming it.
    """
    policies = _policies(config)
    traffic = read_traffic(config)
    model, weights = load_model(config, traffic)
    if model is not None and "full" not in policies:
        policies = ("full", *policies)  # the reference of every comparison
    lanes = make_lanes(config, policies, model, traffic, create_engine)
    key = {name: value for name, value in config.to_dict().items() if name not in ("resume", "live_table")}
    if not config.resume or config.share_across_traces:
        key["started"] = time.time()  # matches no earlier run
    with RowLog(out, key) as log, count_compilations() as compiled:
        replay(config, lanes, traffic, log)
    summary = replay_report.summarise(log.rows, policies)
    summary["recompilations_after_warmup"] = compiled.programs
    result = replay_report.describe(config, policies, log.rows, summary, traffic, weights, out)
    log.remove()
    return result


def _policies(config: ConfigDict) -> tuple[str, ...]:
    names = listed(config.policy)
    if not names:
        raise InputError("policy is empty; name one or several, such as full,prefix,irminsul")
    try:
        for name in (*names, *listed(config.plan_only)):
            get_policy(name)
    except ValueError as error:
        raise InputError(str(error)) from error
    if "full" in listed(config.plan_only):
        raise InputError("plan_only=full: full prefill is what the others are compared with; leave it out")
    return names


def load_model(config: ConfigDict, traffic: Traffic) -> tuple[Any, str]:
    """The model ``config.model`` names, with what is to be said of its weights; None for ``none``."""
    if config.model == "none":
        return None, "No model: plan only, no logits."
    checkpoint = pretrained(config.model)
    try:
        if checkpoint is not None:
            model, weights = models.load(checkpoint, config.dtype), f"Model {checkpoint.name}, trained weights."
        else:
            name = "irminsul-mini-mla" if config.model == "tiny" else config.model
            vocab = {"vocab_size": -(-traffic.encoder.vocab_size // 64) * 64}
            shape = vocab | TINY if config.model == "tiny" else vocab
            model = models.random_model(name, config.seed, config.dtype, **shape)
            weights = (
                f"Model {config.model} with random weights, which attend to everything alike: a changed header reaches "
                "every row above the first layer, so KL and agreement say nothing of a trained model's answers."
            )
    except (ValueError, OSError) as error:
        raise InputError(f"model={config.model}: {error}") from error
    if traffic.encoder.vocab_size > model.vocab_size:
        raise InputError(
            f"tokenizer={config.tokenizer}: its {traffic.encoder.vocab_size} ids exceed the model's vocabulary of "
            f"{model.vocab_size}; name the model's own tokenizer"
        )
    needed = traffic.longest_prompt + max(traffic.longest_response, config.forced_steps + 1)
    if needed > model.max_position:
        raise InputError(
            f"model={config.model}: the longest prompt and response need {needed} positions, the model has "
            f"{model.max_position}; limit the traces or name a model with a longer context"
        )
    return model, weights


def make_lanes(
    config: ConfigDict,
    policies: tuple[str, ...],
    model: Any,
    traffic: Traffic,
    create_engine: Callable[..., Any] | None = None,
) -> list[Lane]:
    """One engine a policy; with a model, each is warmed up, so that nothing should compile later."""
    if create_engine is None:
        from irminsul.engine import Engine

        create_engine = Engine.create
    new_tokens = max(traffic.longest_response, config.forced_steps + 1)
    lanes: list[Lane] = []
    pages = config.pages or _enough_pages(config, model, traffic.longest_prompt + new_tokens)
    try:
        cache = CacheConfig(
            num_pages=pages,
            max_prompt_tokens=traffic.longest_prompt,
            max_new_tokens=new_tokens,
            storage=config.storage,
            dtype=config.dtype,
        )
        for policy in policies:
            computes = model is not None and policy not in listed(config.plan_only)
            engine = create_engine(model if computes else None, cache, policy=policy, mode=config.mode)
            lanes.append(Lane(policy, engine, computes))
    except ValueError as error:
        raise InputError(str(error)) from error
    for lane in lanes:
        if lane.computes:
            warm_up(lane, traffic)
    return lanes


def _enough_pages(config: ConfigDict, model: Any, longest: int) -> int:
    """Pages for a request several times over; planning alone costs 4 bytes a row, so it gets plenty."""
    if model is None:
        return 1 << (17 if config.share_across_traces else 14)
    return 4 * -(-longest // 64) + 64


def warm_up(lane: Lane, traffic: Traffic) -> None:
    """Two short requests in a namespace of their own, the second behind a changed header, both continued."""
    tokens = traffic.encoder.prompt(next(traffic.requests()))[-200:]
    for shift in (0, 37):
        prompt = np.concatenate([tokens[:shift][::-1], tokens])[: traffic.longest_prompt]
        lane.engine.serve(prompt, namespace="warm-up", continuation=tokens[:2])
        lane.engine.serve(prompt, namespace="warm-up", max_new_tokens=2)


def replay(config: ConfigDict, lanes: list[Lane], traffic: Traffic, log: RowLog) -> None:
    """Serves every request on every lane, in order, and logs a row each."""
    table = LiveTable({lane.policy: lane.computes for lane in lanes}) if config.live_table else None
    seen, trace = SeenWindows(), None
    with tqdm(total=traffic.count, desc="replaying", unit=" requests", file=sys.stderr) as progress:
        for request in traffic.requests():
            if request.trace != trace and not config.share_across_traces:
                if trace is not None and trace not in log.finished:
                    log.finish(trace)
                seen = SeenWindows()
            trace = request.trace
            if trace not in log.finished:
                rows = serve_turn(config, lanes, traffic.encoder, request, seen)
                for row in rows:
                    log.append(row)
                if table is not None:
                    tqdm.write(table.lines(rows), file=sys.stdout)
            progress.update()
    if trace is not None and trace not in log.finished:
        log.finish(trace)


def serve_turn(
    config: ConfigDict, lanes: list[Lane], encoder: Encoder, request: Request, seen: SeenWindows
) -> list[dict[str, Any]]:
    """One request on every lane: its rows, in the order of the lanes."""
    prompt, response = encoder.prompt(request), encoder.response(request)
    reachable = int(seen.visit(prompt, response).sum())
    namespace = "shared" if config.share_across_traces else request.trace
    steps = config.forced_steps + 1
    reference: np.ndarray | None = None
    rows = []
    for lane in lanes:
        forced = response
        if lane.policy == "full":  # keeps nothing, so it need not walk through the whole response
            forced = response[:steps]
        if lane.computes and lane.policy == "full" and not len(response):
            served = lane.engine.serve(prompt, namespace=namespace, max_new_tokens=steps)
            response = np.asarray(served.tokens, np.int32)
        else:
            served = lane.engine.serve(prompt, namespace=namespace, continuation=forced if len(forced) else None)
        row = {
            "trace": request.trace,
            "turn": request.turn,
            "policy": lane.policy,
            "tokens": len(prompt),
            "response_tokens": len(response),
            "preamble_tokens": encoder.count(request.preamble + "\n") if request.preamble else 0,
            "reachable": reachable,
            "bins": {name: int(count) for name, count in served.bins.items()},
            "timings": {name: round(float(value), 4) for name, value in served.timings.items()},
        }
        if lane.computes:
            logits = distributions(served, steps)
            reference = logits if lane.policy == "full" else reference
            if reference is not None:
                row["kl"], row["agreement"] = compare(reference, logits)
        rows.append(row)
    return rows


def distributions(served: Any, steps: int) -> Float[np.ndarray, "P V"]:
    """Logits after the prompt and after each of the first ``steps - 1`` tokens that followed it."""
    if served.step_logits is None or not len(served.step_logits):
        return np.asarray(served.logits, np.float64)[None]
    return np.asarray(served.step_logits[:steps], np.float64)


def compare(reference: Float[np.ndarray, "P V"], other: Float[np.ndarray, "P V"]) -> tuple[float, float]:
    """Mean KL(reference || other) in nats over the positions, and the share of them with the same most likely token."""
    agreement = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float(divergence(reference, other).mean()), float(agreement.mean())
