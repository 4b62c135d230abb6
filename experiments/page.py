"""Self-contained HTML pages: one file with its plots inside, for a wide and a narrow window, by day and by night."""

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = """
:root { color-scheme: light dark; --ink: #1b2330; --soft: #5b6675; --paper: #ffffff; --card: #f4f6f9; --line: #d8dee6;
  --accent: #1f4e8c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9f0; --soft: #9aa6b5; --paper: #12161c; --card: #1b212a; --line: #323b48; --accent: #8ab8ee; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { margin: 1.8rem 0 .6rem; }
a { color: var(--accent); }
code, pre { font: .88em/1.5 ui-monospace, monospace; background: var(--card); border-radius: 4px; }
code { padding: .1em .3em; } pre { padding: .8rem; overflow-x: auto; } pre code { padding: 0; }
figure, .scroll { margin: 1rem 0; overflow-x: auto; /* a shade at the edge behind which there is more */
  background: linear-gradient(to right, var(--paper) 30%, transparent) left / 2rem 100% no-repeat local,
    linear-gradient(to left, var(--paper) 30%, transparent) right / 2rem 100% no-repeat local,
    linear-gradient(to right, var(--line), transparent) left / .8rem 100% no-repeat scroll,
    linear-gradient(to left, var(--line), transparent) right / .8rem 100% no-repeat scroll; }
img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; }
@media (max-width: 36rem) { figure img { max-width: none; width: 38rem; } pre { white-space: pre-wrap; } }
.scroll table { width: max-content; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top;
  max-width: 30rem; }
th { color: var(--soft); font-weight: 600; } tr.marked td { font-weight: 600; background: var(--card); }
.soft { color: var(--soft); }
"""
IMAGE = re.compile(r'<p><img src="([^"]+)" alt="([^"]*)" ?/?></p>')


def whole(title: str, body: str, style: str = "") -> str:
    """A page. ``body`` is HTML, ``style`` CSS behind that of all pages, ``title`` text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def from_markdown(text: str, folder: Path) -> str:
    """HTML of a Markdown text; its tables scroll where they are wider than the window, and the images that lie in
    ``folder`` are put inside. HTML within the text is shown as text."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    return IMAGE.sub(lambda found: _inlined(found, folder), body)


def _inlined(found: re.Match[str], folder: Path) -> str:
    path = folder / found[1]
    return figure(path, html.unescape(found[2])) if path.is_file() else found[0]


def figure(path: Path, text: str) -> str:
    """An image with its bytes in the page, and what it shows for who cannot see it."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    kind = "svg+xml" if path.suffix == ".svg" else path.suffix.lstrip(".")
    return f'<figure><img src="data:image/{kind};base64,{data}" alt="{html.escape(text)}"></figure>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], marked: Iterable[bool] = ()) -> str:
    """HTML of a table of texts; rows that are ``marked`` stand out."""
    marks = list(marked)
    head = "".join(f"<th>{html.escape(text)}</th>" for text in header)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in row)
        mark = ' class="marked"' if index < len(marks) and marks[index] else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
