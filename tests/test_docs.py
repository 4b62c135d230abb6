"""The pages: the tutorial's commands run as printed, and no page names a command, flag or file that is not there."""

import ast
import importlib
import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import subprocess

import pytest

from command_line.main import COMMANDS, main

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.parent.name != "roc"]
BLOCK = re.compile(r"(<!-- slow -->\n)?```(\w+)\n(.*?)```", re.DOTALL)
# Set to run what takes minutes, too: the tutorial's demo.
SLOW = bool(os.environ.get("IRMINSUL_SLOW"))


def blocks(path, *kinds):
    """Code of a page by kind, with whether it is marked slow."""
    return [(found[3], bool(found[1])) for found in BLOCK.finditer(path.read_text()) if found[2] in kinds]


def test_the_tutorial_runs_as_printed(tmp_path, monkeypatch, capsys):
    """In a folder that looks like the repository; ``irminsul`` is called in this process, which has imported it."""
    for path in ROOT.iterdir():
        if path.name not in ("results", "build") and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    commands = [
        line for text, slow in blocks(ROOT / "docs/tutorial.md", "sh") if SLOW or not slow for line in text.splitlines()
    ]
    assert len(commands) > 8
    for line in commands:
        words = shlex.split(line)
        if words[0] == "irminsul":
            assert main(words[1:]) == 0, (line, capsys.readouterr().err)
        else:
            subprocess.run(line, shell=True, check=True)
    written = {
        str(path.relative_to(tmp_path / "results/tutorial")) for path in tmp_path.glob("results/tutorial/**/*.html")
    }
    assert written >= {"map.html", "replay/report.html", "replay1/report.html", "compare/compare.html"}
    assert "shifted" in capsys.readouterr().out
    ((code, _),) = blocks(ROOT / "docs/tutorial.md", "python")
    exec(compile(code, "tutorial.md", "exec"), {})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_flags_on_pages_exist(path):
    for text, _ in blocks(path, "sh", "console", "text"):
        for line in re.findall(r"^(?:\.venv/bin/)?irminsul ((?!COMMAND)[^\n|>]+)", text, re.MULTILINE):
            words = shlex.split(line, comments=True)
            if words[0].endswith(":"):
                continue  # the head of a help text
            assert words[0] in COMMANDS, line
            module, variable = COMMANDS[words[0]][0].split(":")
            known = importlib.import_module(module).__dict__[variable].flags()
            for flag in re.findall(r"--([A-Za-z_.]+)", line):
                assert (
                    flag.startswith("config.") or flag == "help" or flag.removeprefix("no") in known or flag in known
                ), line
    for module in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)+)", path.read_text()):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or place.is_dir(), f"{path.name} names {module}"
    for name in re.findall(
        r"`((?:irminsul|models|pallas_kernels|experiments|tests|tools|notebooks)/[\w/.-]+\.\w+)`", path.read_text()
    ):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_command_reference_is_what_is_printed():
    page = runpy.run_path(str(ROOT / "tools" / "write_command_reference.py"))
    assert page["PAGE"].read_text() == page["text"](), "run python -m tools.write_command_reference"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_on_pages_imports_what_there_is(path):
    for text, _ in blocks(path, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], path.name
            elif isinstance(node, ast.Import):
                assert all(importlib.util.find_spec(alias.name) for alias in node.names), path.name
