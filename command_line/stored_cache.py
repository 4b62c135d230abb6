"""``irminsul cache``: what a disk tier holds, whether it is whole, a copy of it, and forgetting."""

import bisect
import dataclasses
from typing import cast

import numpy as np
from absl import flags
from jaxtyping import Int32

import models
from command_line.command import DONE, FOUND_WANTING, Command, add_dtype, exactly, own_flags, print_json, take_action
from command_line.store_contents import Contents, copy_objects, read_contents, verify
from experiments import report, subjects
from experiments.errors import InputError
from irminsul.cache import CacheConfig
from irminsul.cache_format import CacheFormat
from irminsul.store import Store
from irminsul.store_backend import StoreLockedError, StoreWriteError
from irminsul.store_record import StoredObjectError
from models.text_stream import TextStream
from models.tokenizer import Tokenizer
from pallas_kernels.page_table import Storage


def _contents(url: str) -> Contents:
    try:
        return read_contents(url)
    except ValueError as error:
        raise InputError(f"store {url}: {error}") from error


def _stats(arguments: list[str], values: flags.FlagValues) -> int:
    (url,) = exactly(arguments, "URL")
    rows = [dataclasses.asdict(owner) for owner in _contents(url).owners]
    if values.json:
        print_json(rows)
        return DONE
    header = ("namespace", "model", "adapter", "mode", "context", "rows", "pages", "computations", "bytes")
    print(report.markdown_table(header, [[row[name] for name in header] for row in rows]))
    print(
        f"{len(rows)} owners, {sum(row['pages'] for row in rows):,} pages, {sum(row['bytes'] for row in rows):,} bytes"
    )
    return DONE


def _verify(arguments: list[str], values: flags.FlagValues) -> int:
    (url,) = exactly(arguments, "URL")
    found = verify(_contents(url))
    if values.json:
        print_json(found)
    else:
        damaged = ", ".join(f"{count} {reason}" for reason, count in found["damaged"].items()) or "none"
        print(f"{found['whole']:,} pages whole; damaged: {damaged}; rows without a record: {found['unswept']:,}")
        for name in found["names"]:
            print(f"  {name}")
    return FOUND_WANTING if found["damaged"] else DONE


def _export(arguments: list[str], values: flags.FlagValues) -> int:
    source, target = exactly(arguments, "URL URL")
    try:
        found = copy_objects(_contents(source), target)
    except (ValueError, StoreWriteError, StoreLockedError) as error:
        raise InputError(f"store {target}: {error}") from error
    if values.json:
        print_json(found)
    else:
        print(
            f"{target}: {found['pages']:,} pages, {found['bytes']:,} bytes; left out as damaged: {found['left_out']:,}"
        )
    return DONE


def _forget(arguments: list[str], values: flags.FlagValues) -> int:
    (url,) = exactly(arguments, "URL")
    if not values.text or not values.model or not values.namespace:
        raise InputError("--model, --namespace and --text are needed: whose rows of which words go")
    subject = subjects.subject(values.model, values.dtype)
    tokenizer = models.load_tokenizer(values.model, reference=True)
    tokens = tokenizer.encode(values.text)
    owners = [owner for owner in _contents(url).owners if owner.namespace == values.namespace]
    if not owners:
        raise InputError(f"namespace={values.namespace!r} has nothing in {url}; see irminsul cache stats {url}")
    form = owners[0].format
    config = CacheConfig(
        num_pages=1,
        page_size=form.page_size,
        storage=cast(Storage, form.storage),
        dtype=form.dtype,
        dependence=bool(form.dependence),
    )
    for owner in owners:
        differing = owner.format.differences(CacheFormat.of(subject.model, config))
        if differing:
            raise InputError(
                f"model={values.model}: pages of namespace {values.namespace} differ in {', '.join(differing)}, and "
                "forgetting by another model would delete all of them unread; name the model and --dtype they are of"
            )
    try:
        with Store(url, subject.model, config) as store:
            runs = {tuple(tokens.tolist())}
            for sequence in store.sequences(values.namespace):
                runs |= runs_spelling(tokenizer, sequence, values.text)
            reports = [store.forget(np.array(run, np.int32), namespace=values.namespace) for run in sorted(runs)]
    except (StoreLockedError, StoreWriteError, StoredObjectError) as error:
        raise InputError(str(error)) from error
    totals = {
        name: sum(getattr(one, name) for one in reports) for name in ("rows", "pages", "requests", "unknown_rows")
    }
    if values.json:
        print_json({"tokens": len(tokens), "spellings": len(runs), **totals})
    elif totals["rows"]:
        print(
            f"{len(runs)} spellings in tokens sought: {totals['rows']:,} rows of {totals['requests']:,} requests are "
            f"gone, {totals['pages']:,} pages deleted"
        )
    else:
        print("these words stand in no stored prompt or answer of this tenant; nothing is gone")
    return DONE


def runs_spelling(tokenizer: Tokenizer, tokens: Int32[np.ndarray, " T"], text: str) -> set[tuple[int, ...]]:
    """The runs of tokens in which ``text`` stands, however it is cut: inside a prompt a word has other tokens than by
    itself. Tokens of which it is but a part belong to the run."""
    found = set()
    for part in np.split(tokens, np.flatnonzero(tokens < 0)):
        known = part[part >= 0].tolist()
        stream, ends = TextStream(tokenizer, lambda _: None), [0]
        for token in known:
            stream.add(token)
            ends.append(len(stream.text))
        place = stream.text.find(text)
        while place >= 0:
            begin = bisect.bisect_right(ends, place) - 1
            while begin and ends[begin] == ends[begin - 1]:  # halves of a character, and what is shown as nothing
                begin -= 1
            found.add(tuple(known[begin : bisect.bisect_left(ends, place + len(text))]))
            place = stream.text.find(text, place + 1)
    return found


def _run(arguments: list[str], values: flags.FlagValues) -> int:
    return take_action(arguments, values, {"stats": _stats, "forget": _forget, "verify": _verify, "export": _export})


def _flags() -> flags.FlagValues:
    values = own_flags()
    flags.DEFINE_string("model", "", "forget: the model whose rows they are", flag_values=values)
    add_dtype(values, "forget: of that model, as it was served")
    flags.DEFINE_string("namespace", "", "forget: the tenant, as stats shows it", flag_values=values)
    words = "forget: words; wherever they stand they go, and all that was computed behind them"
    flags.DEFINE_string("text", "", words, flag_values=values)
    return values


COMMAND = Command(
    "cache",
    "look into, verify, export and forget what a disk tier holds",
    "stats URL\nverify URL\nexport URL URL\nforget URL --model=NAME --namespace=TENANT --text=WORDS\n"
    "(URL: file:///folder/, gs://..., s3://...)",
    (
        "irminsul cache stats file:///var/cache/irminsul/",
        "irminsul cache verify file:///var/cache/irminsul/ --json",
        "irminsul cache export file:///var/cache/irminsul/ file:///backup/irminsul/",
        'irminsul cache forget file:///var/cache/irminsul/ --model=MODEL --namespace=alice --text="my secret"',
    ),
    _run,
    _flags,
)
