"""A server in a process of its own, and sessions whose header changes every turn, for tests of the endpoint."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from models import checkpoint, families

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "deepseek_v3",
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
WORDS = "cache row page turn key latent token chunk place header agent tool file error line test path value".split()


def save_model(folder: Path) -> None:
    """A tiny random model; the endpoint gives it the tokenizer of the reference models."""
    checkpoint.save_safetensors(families.random_model(TINY, seed=7), folder)


@contextlib.contextmanager
def server(*flags: str):
    """``irminsul serve`` on a free port; the process and its base URL."""
    command = [sys.executable, "-m", "command_line.main", "serve", "--port=0", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield process, found[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def document(session: int) -> str:
    """Some 170 tokens of text of a session."""
    rng = random.Random(session)
    return " ".join(rng.choice(WORDS) for _ in range(160))


def prompt(session: int, turn: int, history: list[dict]) -> list[dict]:
    """The messages of a turn: a header that is new and of another length each time, then what was said so far."""
    rng = random.Random(1000 * session + turn)
    header = f"Session {rng.getrandbits(32):x} at {time.strftime('%H:%M', time.gmtime(turn * 60))} "
    header += " ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 30)))
    system = {"role": "system", "content": header}
    body = {"role": "user", "content": document(session)}
    return [system, body, *history, {"role": "user", "content": f"Question {turn}: what comes next?"}]
