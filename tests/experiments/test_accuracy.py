"""The accuracy study: items whose chunks were cached apart, policies served from one cache, figures in pairs."""

import dataclasses
import gzip
import json
import lzma
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import models
from experiments import (
    accuracy,
    accuracy_merge,
    accuracy_pairs,
    accuracy_report,
    batch_serving,
    drift,
    passage_questions,
    question_items,
    reference_eval,
)
from experiments.configs import accuracy as accuracy_config
from experiments.divergence import divergence
from experiments.errors import InputError
from experiments.reuse_items import CONTINUATION, planted_item
from experiments.reuse_policies import lane
from experiments.subjects import Subject
from irminsul.prefill import prefill
from tests.tolerances import assert_close

LENGTH = 701


@pytest.fixture(scope="module")
def planter():
    return reference_eval.planter()


@pytest.mark.parametrize("task", ["needle", "two_hops", "left_context", "copy", "text"])
def test_chunks_stand_in_the_prompt_and_answers_behind_them(planter, task):
    item = planted_item(planter, task, 0, length=LENGTH, questions=2, seed=3, longest=LENGTH)
    text = item.prompt.tobytes()
    for chunk in item.chunks:
        assert chunk.astype(np.int32).tobytes() in text
    chunk_tokens = sum(map(len, item.chunks))
    assert item.answers[0][0] >= chunk_tokens
    assert item.answers[-1][1] == len(item.prompt) <= LENGTH
    again = planted_item(planter, task, 0, length=LENGTH, questions=2, seed=3, longest=LENGTH)
    other = planted_item(planter, task, 0, length=LENGTH, questions=2, seed=4, longest=LENGTH)
    assert np.array_equal(item.prompt, again.prompt)
    assert not np.array_equal(item.prompt, other.prompt)


def test_a_chunk_that_refers_to_its_heading_was_cached_behind_another(planter):
    item = planted_item(planter, "left_context", 1, length=LENGTH, questions=2, seed=0, longest=LENGTH)
    headings = item.chunks[0::2]
    for own, context in zip(np.repeat(np.arange(len(headings)), 2), item.contexts, strict=True):
        assert context[1:].tobytes() == headings[(own + 1) % len(headings)].tobytes()
        assert context[1:].tobytes() != headings[own].tobytes()


def small_config(**changes) -> ConfigDict:
    config = accuracy_config.get_config()
    settings = {"tasks": "needle,text", "samples": 2, "length": 300, "questions": 1, "draws": 50}
    config.update({**settings, "new_tokens": CONTINUATION, **changes})  # one shape of caches, fewer programs
    return config


def tiny_server(planter, name, task, mode="fast", **shape):
    model = models.random_model(name, 0, "float32", hidden_size=32, num_hidden_layers=3, intermediate_size=48, **shape)
    chosen = Subject("tiny", model, lambda text: np.zeros(0, np.int32), False)
    items = [planted_item(planter, task, index, length=300, questions=1, seed=0, longest=560) for index in range(2)]
    return accuracy.Server(chosen, small_config(mode=mode), items)


@pytest.fixture(scope="module")
def servers(planter):
    shape = {"first_k_dense_replace": 3, "kv_lora_rank": 16}
    return [tiny_server(planter, "irminsul-mini-mla", task, **shape) for task in ("needle", "text")]


@pytest.fixture(scope="module")
def rows(servers):
    lanes = [lane(name) for name in ("full", "naive", "irminsul", "isolated")]
    return [{"model": "tiny", "weights": "", **row} for server in servers for row in server.rows(lanes, 2)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("latent", "irminsul+repair:0.2"), ("latent", "cacheblend:0.2"), ("latent", "isolated"), ("grouped", "naive")],
)
def test_a_batch_is_served_as_the_engine_serves_each(planter, servers, kind, name):
    each = lane(name)
    server = servers[0 if each.isolated else 1]  # the texts are too short for a chunk behind the sink
    if kind == "grouped":
        server = tiny_server(planter, "irminsul-mini-gqa", "text", "deterministic")
    beside = [lane("irminsul")] if name == "naive" else []
    *others, served = server.serve([*beside, each])  # of one policy, or of two side by side
    mode = server.config.mode
    for index, asked in enumerate(server.asked):
        alone = prefill(server.model, server.cached(each)[index], asked.prompt, each.policy, mode=mode, donate=False)
        assert served.bins[index] == alone.request.plan.bins
        assert_close(np.asarray(served.logits[index][0]), np.asarray(alone.logits))
    assert sum(bins["shifted"] for bins in served.bins) > 100
    for turned in others:
        assert np.abs(np.asarray(served.logits) - np.asarray(turned.logits)).max() > 1e-4


def test_the_oracle_wins_back_what_its_budget_buys(servers):
    server = servers[1]
    full, blind, some, everything = (
        np.asarray(served.logits)
        for served in server.serve([lane(name) for name in ("full", "irminsul", "oracle:0.5", "oracle:1.0")])
    )
    far, nearer = (np.abs(other - full).max() for other in (blind, some))
    assert far > 1e-2
    assert nearer < 0.8 * far
    assert_close(everything, full)


def test_a_session_that_drifts_keeps_what_it_computed(servers):
    server, each = servers[1], lane("irminsul")
    logits, kept, bins = drift.serve_and_keep(server.model, server.cached(each), server.asked, each.policy)
    (served,) = server.serve([each])
    assert_close(np.asarray(logits), np.asarray(served.logits))
    assert [one["shifted"] for one in bins] == [one["shifted"] for one in served.bins]
    *_, again = drift.serve_and_keep(server.model, kept, server.asked, each.policy)
    assert min(one["shifted"] + one["exact"] for one in again) > max(one["shifted"] for one in bins)


def test_turns_of_a_session_overlap_behind_headers_that_differ():
    text = np.arange(5000, dtype=np.int32)
    config = ConfigDict({"turns": 4, "messages": 3, "message": 50, "scored": 8})
    turns = drift.session(text, 7, np.random.default_rng(0), config)
    for earlier, later in pairwise(turns.prompts):
        assert later[-150:-50].tolist() == earlier[-100:].tolist()
        assert later[:25].tolist() != earlier[:25].tolist()
    for prompt, behind in zip(turns.prompts, turns.behind, strict=True):
        assert behind.tolist() == list(range(prompt[-1] + 1, prompt[-1] + 9))


def test_forced_tokens_are_what_decoding_would_write(servers):
    server = servers[1]
    (served,) = server.serve([lane("irminsul")])
    prompt = server.items[0].prompt
    later = len(server.asked[0].prompt) + 40
    alone = prefill(
        server.model, server.cached(lane("irminsul"))[0], prompt[:later], lane("irminsul").policy, donate=False
    )
    assert alone.request.plan.bins["shifted"] == served.bins[0]["shifted"]
    assert_close(np.asarray(served.logits[0][40]), np.asarray(alone.logits))


def test_full_prefill_is_its_own_reference_and_reuse_is_not(rows):
    for row in rows:
        assert sum(row["bins"].values()) == row["tokens"]
        if row["policy"] == "full":
            assert max(row["kl_tokens"]) == 0
            assert row["bins"]["shifted"] == 0
            assert row["agreement"] == 1
        else:
            assert (max(row["kl_tokens"]) > 0) == (row["bins"]["shifted"] > 0)
    assert sum(row["bins"]["shifted"] for row in rows if row["policy"] == "irminsul") > 200


def test_text_is_scored_token_by_token(rows):
    scored = {row["task"]: len(row["kl_tokens"]) for row in rows}
    assert scored["text"] == CONTINUATION
    assert 0 < scored["needle"] < 16


def test_cells_pair_each_policy_with_full_prefill(rows):
    cells = accuracy_report.cells_of(rows, 50, 0)
    by = {(cell["task"], cell["policy"]): cell for cell in cells}
    assert by["text", "full"]["difference_interval"] == (0, 0)
    assert by["text", "full"]["kl"] == 0
    assert (
        by["text", "irminsul"]["kl_interval"][0] <= by["text", "irminsul"]["kl"] <= by["text", "irminsul"]["kl_worst"]
    )
    summary = accuracy_report.summarise(cells)
    assert summary["needle_recall_full"] == summary["exact_match_needle_full"]
    turned = np.mean([by[task, "irminsul"]["kl"] for task in ("needle", "text")])
    naive = np.mean([by[task, "naive"]["kl"] for task in ("needle", "text")])
    assert summary["kl_reduction_vs_naive"] == pytest.approx(1 - turned / naive)
    assert "left_context_repair_over_full" not in summary


def test_what_is_generated_is_what_forcing_it_would_have_predicted(servers):
    server, each, steps = servers[1], lane("irminsul+repair:0.2"), 5
    caches = server.cached(each)
    served = batch_serving.serve(server.model, caches, server.asked, each.policy, steps=steps)
    said = np.asarray(served.generated)
    forced = [
        batch_serving.Asked(asked.prompt, tokens, np.arange(-1, steps - 1) + len(asked.prompt))
        for asked, tokens in zip(server.asked, said, strict=True)
    ]
    again = batch_serving.serve(server.model, caches, forced, each.policy)
    assert again.bins == served.bins
    assert np.asarray(again.logits)[:, :steps].argmax(-1).tolist() == said.tolist()


LINES = [
    {"context": "The lamp is red.\n" * 90, "input": "which colour is the lamp?", "answers": ["red", "the red one"]},
    {"input": "Note: the code of Ann is 7134.\n" * 40 + "What is the code of Ann?", "outputs": ["7134"]},
    {"context": "The door is blue.\n" * 120, "input": "which colour is the door?", "answers": ["blue"]},
]


def test_files_of_json_lines_are_tasks(planter, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")

    def encode(text):
        return np.array(planter.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    chosen = Subject("tiny", None, encode, False, bos=planter.bos, decode=planter.tokenizer.decode)
    found = question_items.items(str(path), tmp_path, chosen, range(5), 4096, 0)
    assert [item.wanted for item in found] == [("red", "the red one"), ("7134",), ("blue",)]
    assert [item.contained for item in found] == [False, True, False]
    beginning = question_items._begin(chosen).tolist()
    for item in found:
        text = planter.tokenizer.decode(item.asked.prompt)
        assert text.endswith(("Answer:", "What is the code of Ann?"))
        assert planter.tokenizer.decode(item.asked.forced).strip() == item.wanted[0]
        for earlier, chunk in zip(item.earlier(), item.chunks, strict=True):
            assert earlier[: len(beginning)].tolist() == beginning
            assert earlier[-len(chunk) :].tolist() == chunk.tolist()
            assert chunk.tobytes() in item.prompt.tobytes()
    path.write_text('{"question": "?"}', encoding="utf-8")
    question_items._asked.cache_clear()
    with pytest.raises(InputError, match="LongBench has context, input and answers"):
        question_items.items(str(path), tmp_path, chosen, range(1), 4096, 0)


def test_the_same_prompts_behind_passages_cached_alone_behind_the_sink_or_behind_others(planter, tmp_path):
    def encode(text):
        return np.array(planter.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    gold = [[{"title": f"Lamp {n}", "text": f"Lamp {n} is red. " * 9}] for n in range(3)]
    rows = [{"question": "which colour?", "answers": ["red"], "gold": passages} for passages in gold]
    wiki = [{"title": "Door", "text": f"The door number {n} is as blue as ever. " * 9} for n in range(6)]
    for name, lines in ((passage_questions.FILES["nq"], rows), (passage_questions.WIKI, wiki)):
        with gzip.open(tmp_path / name, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    chosen = Subject("tiny", None, encode, False, bos=planter.bos)
    behind, alone, sink, text = (
        question_items.items(task, tmp_path, chosen, range(3), 4096, 0)
        for task in ("nq_one", *question_items.CACHED_ALONE)
    )
    sinks = {name: tokens.tolist() for name, tokens in question_items.sinks(chosen).items()}
    kept, repeated = sinks["isolated-text"], [planter.bos] * 32
    assert [lane(name, sinks).stored[1] for name in sinks] == [tuple(repeated), tuple(kept)]
    assert lane("isolated", sinks).stored == (True, ()) != lane("irminsul").stored
    for one, two, three, four in zip(behind, alone, sink, text, strict=True):
        assert one.prompt.tolist() == two.prompt.tolist() == three.prompt.tolist() == four.prompt.tolist()
        begin, *passages = (earlier.tolist() for earlier in two.earlier())
        assert begin == one.prompt[: len(begin)].tolist() == question_items._begin(chosen).tolist()
        assert passages == [chunk.tolist() for chunk in one.chunks]
        assert [earlier.tolist() for earlier in three.earlier()] == [begin, *(repeated + each for each in passages)]
        assert [earlier.tolist() for earlier in four.earlier()] == [begin, *(kept + each for each in passages)]
        assert all(earlier.tolist()[: len(begin)] == begin for earlier in one.earlier())
        assert ["Lamp" in planter.tokenizer.decode(chunk) for chunk in one.chunks] == [False, True]


def test_a_carve_out_can_be_left_out_of_any_policy():
    for name in ("irminsul", "epic:8", "cacheblend:0.15", "oracle:0.05"):
        kind, mark, budget = name.partition(":")
        with_it, without = lane(name), lane(f"{kind}-no-carve-out{mark}{budget}")
        assert (with_it.policy.sink_tokens, without.policy.sink_tokens) == (32, 0)
        assert without.oracle == with_it.oracle
        assert dataclasses.replace(without.policy, sink_tokens=32) == with_it.policy
    with pytest.raises(InputError, match="unknown"):
        lane("none-no-carve-out:8")


def test_what_is_generated_is_read_by_its_first_line_or_as_a_whole(servers):
    server = servers[0]
    asked = dataclasses.replace(server.items[0], wanted=("The red one", "red"))
    said = {"a red one\nQuestion": (1, 1), "red or green\n": (0, 0.5)}
    for text, (exact, f1) in said.items():
        reader = dataclasses.replace(server.chosen, decode=lambda tokens, text=text: text)
        server.chosen, kept = reader, server.chosen
        figures = server.generated(asked, np.zeros(1, np.int32))
        anywhere = server.generated(dataclasses.replace(asked, contained=True), np.zeros(1, np.int32))
        server.chosen = kept
        assert (figures["exact_match"], figures["f1"]) == pytest.approx((exact, f1))
        assert anywhere["exact_match"] == (1 / 2)


def test_divergence_is_the_same_in_numpy_and_jax():
    first, second = np.random.default_rng(0).normal(size=(2, 5, 11))
    plain = divergence(first, second)
    probabilities = np.exp(first) / np.exp(first).sum(-1, keepdims=True)
    others = np.exp(second) / np.exp(second).sum(-1, keepdims=True)
    assert plain == pytest.approx((probabilities * np.log(probabilities / others)).sum(-1))
    assert np.asarray(divergence(jnp.asarray(first), jnp.asarray(second + 2.0))) == pytest.approx(plain, rel=1e-4)


def test_unknown_tasks_and_policies_are_named(tmp_path):
    with pytest.raises(InputError, match="tasks=riddles"):
        accuracy.run(small_config(tasks="riddles"), tmp_path)
    with pytest.raises(InputError, match="policies=guess"):
        accuracy.run(small_config(policies="guess"), tmp_path)


def made_row(policy: str, item: int, kl: float, repair: int) -> dict:
    bins = {"exact": 0, "shifted": 100 - repair, "repair": repair}
    return {"model": "tiny", "task": "nq", "item": item, "policy": policy, "kl_tokens": [kl, kl], "bins": bins}


def test_repair_is_compared_in_pairs_with_those_that_recompute_as_much():
    rows = []
    for item, noise in enumerate((0.0, 1.0, 3.0)):  # as large as it is between items, in pairs it cancels
        for policy, kl, repair in (("irminsul+repair:0.1", 0.1, 10), ("cacheblend:0.1", 0.3, 10), ("epic:4", 0.2, 4)):
            rows.append(made_row(policy, item, kl + noise, repair))
        rows += [made_row("epic:16", item, 0.0 + noise, 16), made_row("epic:64", item, 0.0, 40)]
    lines = accuracy_report.contests(rows, 200, 0).splitlines()[4:]
    assert [line.split(" | ")[4] for line in lines] == ["cacheblend:0.1", "epic:16"]
    assert lines[0].endswith("| 0.2 [0.2, 0.2] |")
    assert lines[1].endswith("| -0.1 [-0.1, -0.1] |")
    assert accuracy_report.contests([row for row in rows if "repair" not in row["policy"]], 200, 0) == ""


def test_what_isolation_cost_is_counted_in_pairs():
    rows = []
    for item, level in enumerate((0.0, 0.5, 0.5)):
        for policy, gain in (("isolated", 0.0), ("cacheblend:0.1", 0.25), ("full", 0.5)):
            rows.append({**made_row(policy, item, 0.0, 10), "exact_match": level + gain, "f1": level + gain / 2})
    lines = accuracy_report.won_back(rows, 200, 0).splitlines()[4:]
    assert [line.split(" | ")[2] for line in lines] == ["isolated", "cacheblend:0.1", "full"]
    assert lines[1].endswith("| 0.100 | 0.583 | isolated | +0.250 [+0.250, +0.250] | +0.125 [+0.125, +0.125] |")
    assert "+0.000 [+0.000, +0.000] | +0.000" in lines[0]
    blind = [{**row, "policy": "irminsul-no-carve-out"} for row in rows if row["policy"] == "cacheblend:0.1"]
    lines = accuracy_report.won_back([*rows, *blind], 200, 0).splitlines()[4:]
    assert lines[0].endswith("| irminsul-no-carve-out | -0.250 [-0.250, -0.250] | -0.125 [-0.125, -0.125] |")
    assert accuracy_report.won_back([row for row in rows if row["policy"] != "isolated"], 200, 0) == ""


def test_runs_are_put_together_by_their_finished_batches(tmp_path):
    key = {**small_config().to_dict(), "models": "tiny", "tasks": "nq", "policies": "full,epic:4"}
    first = [
        {"key": key},
        {"row": made_row("epic:4", 0, 0.1, 4)},
        {"row": made_row("full", 0, 0.0, 0)},
        {"finished": "0"},
    ]
    second = [
        {"key": {**key, "policies": "naive", "samples": 9}},
        {"row": made_row("naive", 0, 1.0, 0)},
        {"row": made_row("naive", 7, 1.0, 0)},  # of an item that the others were not asked
        {"finished": "0"},
    ]
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl.xz"]
    for path, records in zip(paths, (first, [*second, {"row": made_row("naive", 1, 1.0, 0)}]), strict=True):
        text = ("".join(json.dumps(record) + "\n" for record in records) + '{"row": {"mod').encode()
        path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    config, rows = accuracy_merge.merged(paths)
    assert [(row["policy"], row["item"]) for row in rows] == [("full", 0), ("epic:4", 0), ("naive", 0)]
    assert (config.policies, config.samples, config.tasks) == ("full,epic:4,naive", 9, "nq")


def test_two_policies_are_compared_on_the_items_both_were_asked():
    asked = [("naive", 0, 0.5), ("naive", 1, 0.25), ("epic:4", 1, 0.125), ("epic:4", 2, 9.0), ("full", 1, 0.0)]
    rows = [{**made_row(policy, item, kl, 10), "exact_match": kl} for policy, item, kl in asked]
    ((model, task, items, *_, right, kl),) = accuracy_pairs.pairs(rows, "naive", "epic:4", 50, 0)
    assert (model, task, items) == (rows[0]["model"], rows[0]["task"], 1)
    assert (right, kl) == ("+0.125 [+0.125, +0.125]", "+0.12 [+0.12, +0.12]")
    with pytest.raises(ValueError, match="no item was asked under both 'naive' and 'oracle'"):
        accuracy_pairs.pairs(rows, "naive", "oracle", 50, 0)
