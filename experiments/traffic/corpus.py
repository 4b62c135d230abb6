"""Real text present on any machine: the sources, docstrings and signatures of Python's standard library."""

import ast
import functools
import json
import sysconfig
from pathlib import Path

# Modules whose public functions become tool schemas: what an agent's tools look like.
TOOL_MODULES = (
    "shutil",
    "subprocess",
    "json",
    "glob",
    "textwrap",
    "difflib",
    "csv",
    "calendar",
    "zipfile",
    "statistics",
)
JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}


def library() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


@functools.cache
def source_files() -> tuple[Path, ...]:
    """The library's top-level modules and the main packages' modules, by name."""
    root = library()
    packages = ("asyncio", "email", "http", "json", "logging", "unittest", "urllib", "xml/etree", "importlib")
    paths = [*root.glob("*.py"), *(path for package in packages for path in (root / package).glob("*.py"))]
    return tuple(sorted(path for path in paths if path.stat().st_size > 2000))


@functools.cache
def source(path: Path) -> str:
    """Text of a source file."""
    return path.read_text(encoding="utf-8", errors="replace")


@functools.cache
def docstrings() -> tuple[str, ...]:
    """The first 500 docstrings of at least 200 characters in the library's modules, in source order."""
    found: list[str] = []
    for path in source_files():
        if len(found) < 500 and path.stat().st_size < 40_000:
            tree = ast.parse(source(path))
            nodes = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            texts = (ast.get_docstring(node) for node in nodes)
            found += [text for text in texts if text and len(text) >= 200]
    return tuple(found[:500])


@functools.cache
def tool_schemas() -> tuple[dict, ...]:
    """JSON schemas in OpenAI's function format, made from public functions that have a docstring."""
    tools = []
    for module in TOOL_MODULES:
        path = library() / f"{module}.py"
        tree = ast.parse(source(path if path.is_file() else library() / module / "__init__.py"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                tools.append(_schema(module.split("/")[0], node))
    return tuple(tools)


def _schema(module: str, function: ast.FunctionDef) -> dict:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    positional = len(function.args.posonlyargs) + len(function.args.args) - len(function.args.defaults)
    defaults = [None] * positional + list(function.args.defaults) + list(function.args.kw_defaults)
    properties: dict[str, dict] = {}
    for argument, default in zip(arguments, defaults, strict=True):
        value = getattr(default, "value", None)
        properties[argument.arg] = {"type": JSON_TYPES.get(type(value).__name__, "string")}
        if isinstance(default, ast.Constant) and value is not None and not isinstance(value, bytes):
            properties[argument.arg]["default"] = value
    required = [argument.arg for argument, default in zip(arguments, defaults, strict=True) if default is None]
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join((ast.get_docstring(function) or "").split())[:240]
    name = f"{module}_{function.name}"
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def listing(path: Path, first: int, lines: int) -> str:
    """What ``nl -ba FILE | sed -n 'A,Bp'`` prints: numbered source lines."""
    body = source(path).splitlines()[first : first + lines]
    return "\n".join(f"{first + offset + 1:6d}\t{line}" for offset, line in enumerate(body))


def matches(path: Path, word: str, limit: int = 60) -> str:
    """What ``grep -n WORD FILE`` prints."""
    lines = enumerate(source(path).splitlines(), start=1)
    return "\n".join(f"{number}:{line}" for number, line in lines if word in line).strip()[: limit * 80]


def tool_call(name: str, arguments: dict) -> str:
    """A tool call as it stands in an assistant's text."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'
