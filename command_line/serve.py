"""``irminsul serve``: an OpenAI-compatible endpoint. Modest by design; for production use an engine such as SGLang."""

import dataclasses
import socket
from pathlib import Path
from typing import Any

from absl import flags

from command_line.command import DONE, Command, add_dtype, own_flags
from experiments.errors import InputError
from irminsul.cache import CacheConfig
from irminsul.policies import get_policy
from irminsul.rope import RotationError
from irminsul.row_quantisation import ROW_DTYPES
from irminsul.sources import text_sink
from irminsul.store_backend import StoreLockedError

DEFAULT_MODEL = "smollm2-135m-mla"
NOTICE = "one process, for research and for reading; for production traffic use an engine such as SGLang or vLLM"


def build(values: flags.FlagValues) -> Any:
    """The application, its model loaded and its cache empty.

    Raises:
      InputError: for what a user can put right.
    """
    try:
        from endpoint import served_model
        from endpoint.app import Endpoint, create_app
        from endpoint.metrics import Metrics
        from endpoint.serving_loop import ServingLoop
        from endpoint.tenants import Tenants
        from irminsul.batching import Batcher
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error}; install the extra serve: pip install '.[serve]' in the repository's folder"
        ) from error
    try:
        served = served_model.load(values.model, values.dtype)
        tenants = Tenants.read(values.api_keys) if values.api_keys else Tenants()
    except (ValueError, OSError, ImportError) as error:
        raise InputError(str(error)) from error
    longest = min(values.prompt_tokens, served.model.max_position - 1)
    pages = values.pages or values.slots * (-(-(longest + values.answer_tokens) // 64) + 2)
    try:
        config = CacheConfig(
            num_pages=pages, max_prompt_tokens=longest, max_new_tokens=values.answer_tokens, dtype=values.row_dtype
        )
        policy = get_policy(values.policy, provenance=values.provenance)
        if values.provenance == "isolated":
            sink = text_sink(served.tokenizer.encode, served.model.config.bos_token_id, policy.sink_tokens)
            policy = dataclasses.replace(policy, sink=sink)
        batcher = Batcher.create(
            served.model, config, policy, values.mode, slots=values.slots, store=values.store or None,
            together=values.together, segment=values.segment,
        )  # fmt: skip
    except (ValueError, RotationError, StoreLockedError) as error:
        raise InputError(str(error)) from error
    return create_app(Endpoint(served, ServingLoop(batcher), config, tenants, Metrics(), values.most_waiting))


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise InputError(f"port={port}: cannot listen on {host} ({error.strerror}); choose another") from error


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    if arguments:
        raise InputError(f"argument {arguments[0]!r} is not understood; serve takes flags only")
    listening = _listen(values.host, values.port)
    try:
        app = build(values)
        import uvicorn

        host, port = listening.getsockname()[:2]
        name = Path(values.model).name
        print(f"{name} at http://{host}:{port}/v1 ({NOTICE})", flush=True)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=30)
        uvicorn.Server(settings).run(sockets=[listening])
    finally:
        listening.close()
    return DONE


def _flags() -> flags.FlagValues:
    values = own_flags(json_output=False)
    flags.DEFINE_string("model", DEFAULT_MODEL, "a checkpoint's name or folder", flag_values=values)
    add_dtype(values, "of weights and arithmetic")
    flags.DEFINE_enum("row_dtype", "float32", ROW_DTYPES, "of cached rows", flag_values=values)
    flags.DEFINE_string("host", "127.0.0.1", "address to listen on", flag_values=values)
    flags.DEFINE_integer("port", 8000, "0: any that is free", lower_bound=0, upper_bound=65535, flag_values=values)
    flags.DEFINE_string("policy", "irminsul", "what to reuse", flag_values=values)
    behind = "what moved rows may have been computed behind; exact: none are served"
    provenances = ["same_namespace", "isolated", "exact"]
    flags.DEFINE_enum("provenance", "same_namespace", provenances, behind, flag_values=values)
    modes = "deterministic: the same bits whoever else is served"
    flags.DEFINE_enum("mode", "fast", ["fast", "deterministic"], modes, flag_values=values)
    flags.DEFINE_string("store", "", "URL of a disk tier, such as file:///var/cache/irminsul/", flag_values=values)
    keys = "file of lines NAME KEY; without one every key is let in, as a tenant of its own"
    flags.DEFINE_string("api_keys", "", keys, flag_values=values)
    flags.DEFINE_integer("slots", 8, "answers generated at once", lower_bound=1, flag_values=values)
    together = "prompts in line that share a block where each leaves few tokens to compute: worth it on a GPU"
    flags.DEFINE_integer("together", 1, together, lower_bound=1, flag_values=values)
    segment = "most tokens that such a prompt leaves, with --together"
    flags.DEFINE_integer("segment", 512, segment, lower_bound=1, flag_values=values)
    flags.DEFINE_integer("pages", 0, "of the cache, 64 rows each; 0: what the slots can need", flag_values=values)
    flags.DEFINE_integer("prompt_tokens", 4096, "longest prompt", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("answer_tokens", 512, "longest answer", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("most_waiting", 256, "requests beyond are told to try later", flag_values=values)
    return values


COMMAND = Command(
    "serve",
    "an OpenAI-compatible endpoint over the content cache",
    "[--model=NAME] [--port=8000] [--mode=deterministic] [--store=URL]",
    (
        "irminsul serve --port=8000",
        "irminsul serve --model=irminsul-mini-mla --mode=deterministic --store=file:///var/cache/irminsul/",
    ),
    _run,
    _flags,
)
