"""Readers: from a packaged file to plain-text documents, and the cleaning all of them share."""

import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

_DROPPED = re.compile(r"<(script|style|nav|header|footer|head|svg|select|form)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I)
_BLOCK = re.compile(
    r"</?(?:p|div|br|li|ul|ol|dl|dt|dd|tr|table|h[1-6]|pre|section|article|blockquote|hr)\b[^>]*>", re.I
)
_PREFORMATTED = re.compile(r"<pre\b[^>]*>(.*?)</pre\s*>", re.S | re.I)
_TAG = re.compile(r"<[^>]+>")
_ROFF_FONT = re.compile(r"\\f(?:\[[^]]*\]|\(..|.)")
_ROFF_ESCAPE = re.compile(r"\\(?:\*\(..|\*.|s[-+]?\d+|[&/,|^]|h'[^']*'|v'[^']*')")
_COMMON_ENGLISH = frozenset("the of and to in is for that a it with as are this be on or by from which".split())


def read_text(path: Path) -> str:
    """The file's text, unzipped where its name says so; undecodable bytes are dropped."""
    raw = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        raw = gzip.decompress(raw)
    return raw.decode("utf-8", errors="ignore")


def html_to_text(source: str) -> str:
    """Drops script, style, head and navigation; block tags become line ends; entities are resolved."""
    source = _DROPPED.sub(" ", source)
    kept: list[str] = []  # preformatted text keeps its line ends, all other white space collapses

    def stash(match: re.Match) -> str:
        kept.append(match[1])
        return f"<p>\x00{len(kept) - 1}\x00<p>"

    source = re.sub(r"\s+", " ", _PREFORMATTED.sub(stash, source))
    source = re.sub(r"\x00(\d+)\x00", lambda match: kept[int(match[1])], source)
    return html.unescape(_TAG.sub("", _BLOCK.sub("\n", source)))


def man_to_text(source: str) -> str:
    """Roff to text: macro lines go (their heading text stays), font changes and escapes go."""
    lines = []
    for line in source.splitlines():
        if line.startswith((".", "'")):
            heading = re.match(r"\.(?:SH|SS|IP|Sh|Ss)\s+(.*)", line)
            line = heading[1].strip('"') if heading else ""
            line = re.sub(r'"?\s+\d+$', "", line)
        line = _ROFF_ESCAPE.sub("", _ROFF_FONT.sub("", line.replace("\\-", "-").replace("\\e", "\\")))
        lines.append(line.replace("\\(aq", "'").replace("\\(bv", "|").replace("\\ ", " "))
    return "\n".join(lines)


def _html(path: Path) -> Iterator[str]:
    yield html_to_text(read_text(path))


def _plain(path: Path) -> Iterator[str]:
    text = read_text(path)
    for start in range(0, len(text), 30_000):
        yield text[start : start + 30_000]


def _man(path: Path) -> Iterator[str]:
    yield man_to_text(read_text(path))


def _dictd(path: Path) -> Iterator[str]:
    """A dictionary is one file of entries in alphabetical order: documents of about 12,000 characters of it.

    Entries of one document share a neighbourhood of the alphabet, so holding out documents holds out headwords.
    """
    text = re.sub(r"[{}\\]|\[(?:1913 Webster|PJC|WordNet 1\.5)[^]]*\]", "", read_text(path))
    entries = re.split(r"\n(?=\S)", re.sub(r"\n[ \t]+", " ", text))
    document: list[str] = []
    for entry in entries:
        document.append(re.sub(r"[ \t]+", " ", entry).strip())
        if sum(map(len, document)) > 12_000:
            yield "\n".join(document)
            document = []
    yield "\n".join(document)


def _mallard(path: Path) -> Iterator[str]:
    source = re.sub(r"<info>.*?</info>", "", read_text(path), flags=re.S)
    source = re.sub(r"</(?:p|title|item|section|note|code)>", "<br/>", source)
    yield html_to_text(source)


def _wiki(path: Path) -> Iterator[str]:
    """Ten summaries a document."""
    data = json.loads(read_text(path))
    entries = list(data.values()) if isinstance(data, dict) else data
    texts = [entry if isinstance(entry, str) else entry["extract"] for entry in entries]
    for start in range(0, len(texts), 10):
        yield "\n\n".join(texts[start : start + 10])


READERS = {"html": _html, "plain": _plain, "man": _man, "dictd": _dictd, "mallard": _mallard, "wiki": _wiki}


def clean(text: str) -> str:
    """Normalises white space, drops control characters, long unbroken strings and lines without a letter."""
    text = re.sub(r"[^\S\n]+$", "", text.replace("\r", "").replace("\u00a0", " ").replace("\u00b6", ""), flags=re.M)
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\u200b\ufeff]", "", text)
    lines = [line for line in text.split("\n") if not line or (any(map(str.isalpha, line)) and len(line) < 8000)]
    lines = [line for line in lines if not re.search(r"\S{120,}", line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def is_english(text: str) -> bool:
    """Mostly ASCII, and enough of the most frequent English words (code listings have few, translations none)."""
    if not text or sum(character < "\x80" for character in text) < 0.95 * len(text):
        return False
    words = re.findall(r"[a-z]+", text[:20_000].lower())
    return len(words) > 40 and sum(word in _COMMON_ENGLISH for word in words) > 0.08 * len(words)
