"""The table of what breaks for users names tests that exist, one or more for every class."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
CLASSES = 23


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_class_names_tests_that_exist():
    lines = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", TABLE, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, CLASSES + 1))
    for number, cell in lines:
        named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", cell)
        assert named, f"class {number} names no test"
        for path, name in named:
            assert name in functions_in(ROOT / path), f"class {number} names {path}::{name}, which does not exist"
