"""The command ``irminsul``: help, exit codes, errors in one sentence, and what the sub-commands find."""

import importlib
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from command_line import chat, doctor
from command_line.chunk_map import as_page, chunk_map
from command_line.main import COMMANDS, main
from command_line.store_contents import read_contents
from experiments.traffic.tokenization import load_tokenizer
from irminsul.batching import Batcher
from irminsul.cache import CacheConfig
from irminsul.engine import Engine
from irminsul.plan import BINS
from irminsul.rope import RotationError
from models import checkpoint, families
from models.pretrained import TOKENIZER
from tests.models.tiny import DENSE


def command(name):
    module, variable = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), variable)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_of_the_flags_there_are(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"irminsul {name}" in text.split("examples:")[1]
    flags = set(command(name).flags())
    for flag in re.findall(r"--([a-z_]+)=?", text.split("examples:")[1]):
        assert flag in flags | {"config", *(f"no{flag}" for flag in flags)}, flag


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["divine"], "'divine' is no command"),
        (["census"], "no trace is named"),
        (["run"], "name one of accuracy"),
        (["run", "astrology"], "study='astrology' is unknown"),
        (["run", "rotation", "--config.speed=9"], "config.speed is no setting of study rotation; name one of"),
        (["models", "plan", "deepseek-v3", "--row_dtype=int4"], "one of <float32|bfloat16|float16|float8_e4m3fn|int8>"),
        (["serve", "--dtype=bf16"], "one of <float32|bfloat16|float16>"),
        (["serve", "--together=0"], "together=0"),
        (["serve", "--provenance=mine"], "one of <same_namespace|isolated|exact>"),
        (["run", "rotation", "--speed=9"], "Unknown command line flag 'speed'"),
        (["inspect", "one.txt"], "A B is expected"),
        (["inspect", "one.txt", "two.txt"], "one.txt: cannot be read"),
        (["inspect", "/dev/null", "two.txt"], "/dev/null: is empty"),
        (["compare", "nowhere", "nowhere"], "holds no result.json"),
        (["models", "ponder"], "'ponder' is unknown; name one of list, plan"),
        (["models", "plan", "gpt-9"], "known: deepseek-r1"),
        (["models", "plan", "deepseek-v3", "--mesh=tensor=8"], "--memory_gib is missing"),
        (["models", "plan", "deepseek-v3", "--mesh=tensor", "--memory_gib=9"], "give axes as tensor=8"),
        (["models", "plan", "deepseek-v3", "--mesh=tensor=8", "--row_dtype=int8"], "which no mesh is planned with"),
        (["models", "plan", "deepseek-v3", "--memory_gib=-1"], "memory_gib"),
        (["models", "convert", "irminsul-mini-gqa"], "--out=DIR is missing"),
        (["models", "convert", "irminsul-mini-gqa", "--out=x", "--rope_width=7"], "rope_width=7 must be even"),
        (["cache", "stats", "file:///nowhere/to/be/found/"], "holds no cache"),
        (["cache", "forget", "file:///nowhere/"], "--model, --namespace and --text are needed"),
        (["chat", "hello"], "'hello' is not understood"),
        (["doctor", "--kernels=perhaps"], "kernels"),
    ],
)
def test_bad_input_is_one_sentence_with_code_2(arguments, sentence, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_a_plan_says_whether_the_weights_fit(capsys):
    for memory, words in ((1000, "1000 GiB do not hold the weights"), (1400, "1400 GiB hold the weights and 2,")):
        assert main(["models", "plan", "deepseek-v3", "--dtype=bfloat16", f"--memory_gib={memory}"]) == 0
        assert words in capsys.readouterr().out


def test_a_server_is_made_as_its_flags_say(capsys, monkeypatch):
    def create(model, config, policy, mode, **settings):
        sink = len(set(policy.sink)) > 16  # a text, no token repeated
        raise ValueError(f"{policy.name} {policy.provenance} {sink} {mode} {config.max_new_tokens} {settings}")

    monkeypatch.setattr(Batcher, "create", create)
    flags = (
        "--policy=epic --provenance=isolated --mode=deterministic --answer_tokens=9 --together=2 --segment=99 --slots=3"
    )
    assert main(["serve", "--port=0", "--model=irminsul-mini-mla", *flags.split()]) == 2
    settings = {"slots": 3, "store": None, "together": 2, "segment": 99}
    assert capsys.readouterr().err == f"error: epic isolated True deterministic 9 {settings}\n"


def test_flags_of_one_call_are_not_those_of_the_next(capsys):
    for arguments, tokens in ((["--tokens=7"], 7), ([], 100_000)):
        assert main(["models", "plan", "deepseek-v2-lite", "--json", "--dtype=bfloat16", *arguments]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["cache_bytes_per_token"] == 27 * (512 + 64) * 2
        assert plan["cache_bytes"] == tokens * plan["cache_bytes_per_token"]
    mesh = ["--mesh=tensor=4,expert=4", "--memory_gib=141"]
    assert main(["models", "plan", "deepseek-v3", "--json", "--dtype=bfloat16", *mesh]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weight_bytes"] / 16 <= plan["parameter_bytes_per_device"] < plan["weight_bytes"] / 8
    assert plan["cache_tokens"] > 0 == plan["tokens_that_fit"]


def test_chunk_map_says_where_each_token_was(tmp_path, capsys):
    rng = np.random.default_rng(3)
    words = rng.integers(300, 8000, 700).astype(np.int32)
    first = np.concatenate([words[:13], words[100:]])
    second = np.concatenate([words[50:71], words[100:]])  # a header of 21 tokens instead of 13
    found = chunk_map(first, second)
    assert [run.begin for run in found.runs] == [0, *(run.end for run in found.runs[:-1])]
    assert found.runs[-1].end == len(second) == sum(found.bins.values())
    moved = [run for run in found.runs if run.bin == "shifted"]
    assert sum(run.end - run.begin for run in moved) > 500
    for run in moved:
        assert run.delta == 8
        assert np.array_equal(first[run.source : run.source + run.end - run.begin], second[run.begin : run.end])
    assert not [run for run in chunk_map(first, words[:99]).runs if run.bin == "shifted"]

    tokenizer = load_tokenizer(str(TOKENIZER))
    page = as_page(found, tokenizer, ("<one>", "two"))
    assert "&lt;one&gt;" in page
    for link in re.findall(r'href="#(source-\d+)"', page):
        assert f'id="{link}"' in page
    for name, tokens in (("a.txt", first), ("b.txt", second)):
        (tmp_path / name).write_text(tokenizer.decode(tokens.tolist()))
    assert main(["inspect", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--html", str(tmp_path / "m.html")]) == 0
    assert "shifted" in capsys.readouterr().out
    assert (tmp_path / "m.html").read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store with a page or two of two tenants, and the checkpoint that wrote them."""
    folder = tmp_path_factory.mktemp("stored")
    model = families.random_model(DENSE, vocab_size=8192)
    checkpoint.save_safetensors(model, folder / "model")
    url = f"file://{folder}/store/"
    config = CacheConfig(num_pages=16, max_prompt_tokens=256, max_new_tokens=0)
    engine = Engine.create(model, config, mode="deterministic", store=url)
    tokenizer = load_tokenizer(str(TOKENIZER))
    secret = tokenizer.encode("It is said: the password is swordfish, they say").ids
    by_itself = tokenizer.encode("password is sword").ids
    assert str(by_itself)[1:-1] not in str(secret)  # in a sentence words have other tokens than alone
    rest = np.random.default_rng(5).integers(300, 8000, 131)
    engine.serve(np.concatenate([rest[:67], secret, rest[67:]]).astype(np.int32), namespace="alice")
    engine.serve(rest.astype(np.int32), namespace="bob")
    engine.store.close()
    return url, folder


def test_stored_pages_are_counted_checked_copied_and_forgotten(stored, capsys):
    url, folder = stored

    def run(*arguments):
        code = main(["cache", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    pages = {row["namespace"]: row["pages"] for row in run("stats", url)[1]}
    assert set(pages) == {"alice", "bob"}
    assert run("verify", url) == (0, {"whole": sum(pages.values()), "damaged": {}, "names": [], "unswept": 0})
    copy = f"file://{folder}/copy/"
    assert run("export", url, copy)[1]["pages"] == sum(pages.values())

    rows = next((folder / "copy").glob("*/*/rows/*"))
    rows.write_bytes(rows.read_bytes()[:-5])
    code, found = run("verify", copy)
    assert code == 1
    assert found["damaged"] == {"truncated": 1}
    assert found["whole"] == sum(pages.values()) - 1
    assert run("export", copy, f"file://{folder}/third/")[1]["left_out"] == 1

    forget = ["forget", url, f"--model={folder}/model", "--text=password is sword"]
    code, found = run(*forget, "--namespace=alice")
    assert (code, found["requests"], found["spellings"]) == (0, 1, 2)
    left = {owner.namespace: owner.pages for owner in read_contents(url).owners}
    assert left["bob"] == pages["bob"]
    assert left.get("alice", 0) < pages["alice"]
    # Another model's pages are not deleted by mistake.
    assert main([*["cache", *forget], "--namespace=bob", "--dtype=bfloat16"]) == 2
    assert "differ in model, and" in capsys.readouterr().err
    assert {owner.namespace: owner.pages for owner in read_contents(url).owners}["bob"] == pages["bob"]


def test_self_test_passes_a_model_and_fails_a_wrong_one(stored, capsys, monkeypatch):
    _, folder = stored
    assert main(["models", "self-test", str(folder / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] < 1e-4

    def refuse(*_):
        raise RotationError("queries and cached keys are turned by different rules")

    monkeypatch.setattr("command_line.checkpoints.check_rotation", refuse)
    assert main(["models", "self-test", str(folder / "model")]) == 1
    assert "different rules" in capsys.readouterr().out


def test_doctor_tells_what_runs_and_why_the_rest_does_not(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "OPS", {"rotate_keys": doctor.OPS["rotate_keys"]})
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"rotate_keys, xla +runs", text)
    assert re.search(r"rotate_keys, mosaic_gpu +no: needs an NVIDIA Hopper GPU", text)

    def attend(x, implementation):
        return x if implementation == "xla" else 2 * x

    problem = lambda: (attend, {"x": np.ones(3, np.float32)})  # noqa: E731
    monkeypatch.setattr(doctor, "OPS", {"op": (problem, ("xla", "mosaic_gpu"))})
    assert main(["doctor", "--json"]) == 1
    kernels = {kernel["implementation"]: kernel for kernel in json.loads(capsys.readouterr().out)["kernels"]}
    assert kernels["xla"]["runs"]
    assert "differs from XLA by 1" in kernels["mosaic_gpu"]["why_not"]


class Talker:
    """Answers with the number of its messages; refuses a fourth one as too long."""

    def __init__(self):
        self.asked = []

    def ask(self, words, on_text, **sampling):
        if len(self.asked) == 3:
            raise ValueError("the conversation is longer than the cache serves")
        self.asked.append((words, sampling))
        on_text(f"answer {len(self.asked)}")
        bins = dict.fromkeys(BINS, 0) | {"exact": 40, "shifted": 30, "new": 9, "last": 1}
        return SimpleNamespace(tokens=[1, 2], timings={"ttft_ms": 20.0}, bins=bins)


def test_chat_shows_the_bins_of_each_answer_and_outlives_a_line_too_long(capsys):
    talker = Talker()
    assert chat.talk(talker, io.StringIO("one\ntwo\nthree\nfour\n\nfive\n"), temperature=0.5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [words for words, _ in talker.asked] == ["one", "two", "three"]
    assert talker.asked[0][1] == {"temperature": 0.5}
    assert lines[0] == "answer 1"
    assert "70 of 80 prompt tokens from the cache (exact 40, shifted 30, new 9, last 1)" in lines[1]
    assert lines[-1] == "[the conversation is longer than the cache serves]"
