"""What rewriting grouped attention as MLA costs: text, questions, and reuse at another position.

A table of conversion methods and sizes on a public model (default SmolLM2-135M-Instruct), each against the original on
the same text and questions. Every finished measurement is kept (``convert_parts.py``): a study that is stopped goes on
from there, and several processes can share one.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import models
from experiments import convert_report, passage_questions, report, subjects
from experiments.batch_generation import continuations
from experiments.convert_parts import Form, Parts, shared_out
from experiments.convert_shift import shift_divergences
from experiments.errors import InputError
from experiments.passage_questions import PassageQuestion
from models import convert
from models.convert import healed
from models.families import Model
from models.kv_view import DenseView

Row = dict[str, Any]
STEPS = 16  # generated tokens, more than any answer's first line
ROOMS = (320, 1216, 1984)  # tokens of a question with its passages, padded to: a program for each
ORIGINAL, LOSSLESS, SHIPPED = "original", "lossless", "shipped"


def run(config: ConfigDict, out: Path) -> report.StudyResult:
    """Measures every form; see ``configs/convert.py``.

    Raises:
      InputError: for evaluation sets, a base or a conversion that is missing, sizes out of range, or parts that were
        measured on different devices or versions.
    """
    try:
        with jax.default_matmul_precision("highest"):
            study = Study(config, out)
            rows = list(study.measure())
            if config.share[1] > 1:
                return {"title": f"{len(rows)} measurements, a share", "summary": {"rows": len(rows)}, "rows": []}
            result = convert_report.describe(config, rows, study.notes(), out)
            return {**result, "environment": study.parts.environment()}
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise InputError(str(error)) from error


class Study:
    """The base, its text and questions, and what was measured so far."""

    def __init__(self, config: ConfigDict, out: Path):
        self.config, self.out = config, out
        self.sizes = config.quick_sizes if config.quick else config.sizes
        self.base = models.load(config.base, jnp.float32)
        self.tokenizer = models.load_tokenizer(config.base)
        self.folder = Path(config.data)
        self.statistics: convert.Statistics | None = None
        self.expected: np.ndarray | None = None  # the original's answers in a chat
        self.parts = Parts(out, config.share)
        self.started = time.monotonic()

    def notes(self) -> list[str]:
        """What figures were measured on."""
        sizes = self.sizes
        length, count = self.config.calibration_length, self.config.calibration_count
        return [
            f"{self.config.base}, weights as published, arithmetic in float32, no training except where healing is "
            f"named. Perplexity on encyclopedia passages ({sizes.texts} stretches of 512 tokens) and on the first 4,096"
            f" tokens of those of {sizes.long_texts} US government reports that have as many. Questions: three "
            "examples in front, greedy, exact match after SQuAD's normalisation, with 95 % bootstrap intervals over "
            "items; differences to the original are paired. A dash: not measured. "
            f"Conversions made here are calibrated on {count} sequences of {length} tokens of technical documentation."
        ]

    def measure(self) -> Iterator[Row]:
        """Rows of every form of this share, a task after the other; those measured before are read."""
        questions = [(task, partial(self._questions, task)) for task in self.sizes.questions]
        questions.sort(key=lambda task: task[0] != "nq")
        tasks: list[tuple[str, Callable[[str, Model], Row]]] = [
            ("text", self._text),
            questions[0],
            ("text_long", self._long_text),
            *questions[1:],
            ("shift", self._shift),
            *((f"needle_{words}", partial(self._needle, words)) for words in self.sizes.needle_words),
            ("chat", self._chat),
        ]
        built: dict[str, Model] = {}  # they share all that is not attention
        forms = shared_out(list(self._forms()), self.config.share)
        for task, measure in tasks:
            for form in forms:
                if task == "shift" and form.name != self.config.main:
                    continue
                if task == "chat" and form.name != ORIGINAL and not form.name.startswith(SHIPPED):
                    continue  # of what people chat with
                found = self.parts.find(form.name, task)
                if found is None:
                    if self.config.measured_only:
                        continue
                    if self.config.minutes and time.monotonic() - self.started > self.config.minutes * 60:
                        raise InputError("minutes is over; the same command goes on from the last finished measurement")
                    if form.name not in built:
                        built[form.name] = plain(form.build())
                    found = {"variant": form.name, "task": task, **measure(form.name, built[form.name])}
                    found["seconds"] = round(time.monotonic() - self.started, 1)
                    self.parts.keep(found)
                yield found

    def _forms(self) -> Iterator[Form]:
        width = self.base.config.num_key_value_heads * self.base.config.head_dim
        yield Form(ORIGINAL, (0, 0), lambda: self.base)
        yield Form(LOSSLESS, (width, width), lambda: self._converted("lossless", None, None))
        if self.config.conversion:
            folder = Path(self.config.conversion)
            shipped = convert.load(folder)
            shape = (shipped.rope_width, shipped.rank)
            plainly = partial(convert.apply, self.base, shipped)
            yield Form(SHIPPED, shape, plainly)
            if list(folder.glob(healed.FILES)):
                yield Form(f"{SHIPPED}, healed", shape, lambda: healed.load(plainly(), folder))
        for method, rope_width, rank in () if self.config.quick else self.config.variants:
            build = partial(self._converted, method, rope_width, rank)
            yield Form(f"{method} {rope_width} + {rank}", (rope_width, rank), build)

    def _converted(self, method: str, rope_width: int | None, rank: int | None) -> Model:
        if method != "lossless" and self.statistics is None:
            self.statistics = self._calibrated()
        conversion = convert.convert(self.base, self.statistics, method=method, rope_width=rope_width, rank=rank)
        return convert.apply(self.base, conversion)

    def _calibrated(self) -> convert.Statistics:
        """Calibrated by this process or, with the same settings, by another one of this study."""
        texts, label = subjects.documents(self.config.calibration)
        count, length = self.config.calibration_count, self.config.calibration_length
        names = [field.name for field in dataclasses.fields(convert.Statistics)]
        about = json.dumps([self.base.digest, label, count, length, names])
        path = self.out / "statistics.npz"
        if path.exists():
            found = dict(np.load(path))
            if str(found.pop("about")) == about:
                return convert.Statistics(int(found.pop("tokens")), **found)
        separator = self.tokenizer.backend.token_to_id("<|endoftext|>")
        blocks = convert.token_blocks(texts, self.tokenizer.encode, length, separator, count)
        statistics = convert.calibrate(
            self.base, blocks, lambda tokens: print(f"calibrated on {tokens:,} tokens", flush=True)
        )
        partial_file = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial_file, about=about, **{name: getattr(statistics, name) for name in names})
        partial_file.replace(path)
        return statistics

    def _text(self, name: str, model: Model) -> Row:
        passages = [row["text"] for row in passage_questions.read(self.folder, passage_questions.WIKI)]
        return self._divergences(model, ["\n\n".join(passages)], 512, self.sizes.texts)

    def _long_text(self, name: str, model: Model) -> Row:
        reports = [row["document"] for row in passage_questions.read(self.folder, passage_questions.REPORTS)]
        if not self.sizes.long_texts:
            return {}
        return self._divergences(model, reports, 4096, self.sizes.long_texts)

    def _divergences(self, model: Model, texts: list[str], length: int, count: int) -> Row:
        """Perplexity of the first stretches of ``length`` tokens, and nats from the original's predictions."""
        stretches = []
        for text in texts:
            ids = self.tokenizer.encode(text)
            whole = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
            stretches += whole[: 1 if len(texts) > 1 else count]  # of several texts the beginning of each
        base = plain(self.base)
        parts = [_compare(base, model, jnp.asarray(tokens)) for tokens in stretches[:count]]
        surprise, kl = (np.stack([np.asarray(part[i], np.float64) for part in parts]) for i in range(2))
        return {
            "perplexity": float(np.exp(surprise.mean())),
            "kl": float(kl.mean()),
            "surprises": surprise.mean(axis=1).round(6).tolist(),
            "tokens": int(surprise.size),
        }

    def _questions(self, task: str, name: str, model: Model) -> Row:
        asked = passage_questions.questions(self.folder, task, self.sizes.questions[task])
        return self._answers(model, asked)

    def _needle(self, words: int, name: str, model: Model) -> Row:
        asked = passage_questions.needles(self.folder, self.sizes.needles, words)
        return self._answers(model, asked)

    def _answers(self, model: Model, asked: list[PassageQuestion]) -> Row:
        beginning = self.tokenizer.encode(passage_questions.EXAMPLES)
        prompts = [self.tokenizer.encode(item.prompt) for item in asked]
        room = next((room for room in ROOMS if max(map(len, prompts)) <= room), ROOMS[-1])
        kept = [index for index, prompt in enumerate(prompts) if len(prompt) <= room]
        tokens = continuations(
            model,
            beginning,
            [prompts[index] for index in kept],
            steps=STEPS,
            room=room,
            batch=self.config.batch,  # also where there are fewer: one program serves every task of this room
        )
        lines = [passage_questions.first_line(self.tokenizer.decode(row)) for row in tokens]
        right = [asked[index].answers for index in kept]
        return {
            "exact": [passage_questions.exact_match(*pair) for pair in zip(lines, right, strict=True)],
            "f1": [round(passage_questions.word_f1(*pair), 6) for pair in zip(lines, right, strict=True)],
            "left_out": len(asked) - len(kept),
        }

    def _chat(self, name: str, model: Model) -> Row:
        """Whether greedy answers to typed questions begin, and go on, as the original's."""
        if not self.sizes.chats:
            return {}
        asked = passage_questions.bare_questions(self.folder, self.sizes.chats)
        prompts = [self.tokenizer.encode_chat([{"role": "user", "content": words}]) for words in asked]
        shared = min(
            int(np.argmin(np.append(prompt[: len(prompts[0])] == prompts[0][: len(prompt)], False)))
            for prompt in prompts
        )
        options = {"steps": STEPS, "room": max(map(len, prompts)) - shared, "batch": self.config.batch}

        def answers(model: Model) -> np.ndarray:
            return np.stack(continuations(model, prompts[0][:shared], [p[shared:] for p in prompts], **options))

        if self.expected is None:
            self.expected = answers(plain(self.base))
        same = np.cumprod(answers(model) == self.expected, axis=1)
        return {"first": same[:, 0].astype(float).tolist(), "whole": same[:, -1].astype(float).tolist()}

    def _shift(self, name: str, model: Model) -> Row:
        asked = passage_questions.questions(self.folder, "nq", self.sizes.shifts)
        beginning = self.tokenizer.encode(passage_questions.EXAMPLES)
        contexts = [np.concatenate([beginning, self.tokenizer.encode(item.passages)]) for item in asked]
        ends = [self.tokenizer.encode(item.question) for item in asked]
        return shift_divergences(model, contexts, ends, self.config.shift)


def plain(model: Model) -> Model:
    """The model without what is static and does not touch the computation, so that models of one shape share programs:
    its digest, and where its layers' frequencies come from (they are in the table)."""
    config = model.config
    if getattr(config, "rope_indices", None) is not None:
        rows = ((0,) * (config.qk_rope_head_dim // 2),) * config.num_hidden_layers
        config = dataclasses.replace(config, rope_indices=rows)
    return dataclasses.replace(model, digest="", config=config)


@jax.jit
def _compare(base: Model, model: Model, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Surprise of each next token, and the divergence of the base's prediction from the model's at each token."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    ours, theirs = (
        jax.nn.log_softmax(each.unembed(each.forward(tokens, positions, DenseView(positions))[0]))
        for each in (model, base)
    )
    surprise = -jnp.take_along_axis(ours[:-1], tokens[1:, None], axis=-1)[:, 0]
    return surprise, jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
