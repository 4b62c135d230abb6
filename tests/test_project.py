"""The project's frame: tracked files, the lock, the make targets, and rules that hold for every module."""

import ast
import os
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("irminsul", "models", "pallas_kernels", "experiments", "command_line", "endpoint")
DOCUMENTED = ("irminsul", "models", "pallas_kernels", "command_line", "endpoint")
# A package may import itself and those named here.
MAY_IMPORT = {
    "pallas_kernels": set(),
    "irminsul": {"pallas_kernels"},
    "models": {"pallas_kernels"},
    "experiments": {"irminsul", "models", "pallas_kernels"},
    "endpoint": {"irminsul", "models"},
    "command_line": {"endpoint", "experiments", "irminsul", "models", "pallas_kernels"},
}
MAX_FILE_BYTES = 16 * 2**20

# In pieces, so that this file does not hold what it forbids.
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.])/" + r"(?:work|root|home)/",  # somebody's machine
            r"/opt/" + r"(?:wheels|pypi)",
            r"\bpypi\." + r"org",
            r"\bpython" + r"hosted\.org",
            r"\bdownload\.pytorch\." + r"org",
            r"--(?:extra-)?" + r"index-url",
            r"--find-" + r"links",
        ]
    )
)
TORCH_PIN = "torch" + "=="


def tracked_files() -> list[pathlib.Path]:
    """Files under version control that exist in the working tree."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: pathlib.Path) -> str | None:
    """The text of a file, None for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def modules(packages: tuple[str, ...]) -> list[pathlib.Path]:
    """Tracked Python files of the packages."""
    return [path for path in tracked_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in packages]


def pins(text: str) -> dict[str, str]:
    """Versions by name of a lock file; any line that is no plain pin is an error."""
    versions = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([A-Za-z0-9.+!]+)", line)
            assert match, f"{line!r} is not of the form name==version"
            versions[match[1]] = match[2]
    return versions


def unmet(requirements: list[str], versions: dict[str, str]) -> list[str]:
    """Requirements that the pinned versions do not satisfy."""
    parsed = [Requirement(text) for text in requirements]
    return [r.name for r in parsed if not r.specifier.contains(versions.get(canonicalize_name(r.name), "0"))]


def is_plain_property(node: ast.stmt) -> bool:
    """A property that returns one expression: its name and type say what it is."""
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
    return decorators == ["property"] and len(node.body) == 1 and isinstance(node.body[0], ast.Return)


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions, classes and methods at module level without a docstring, plain properties aside."""
    missing = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None and not is_plain_property(node):
                    missing.append(f"{prefix}{node.name} (line {node.lineno})")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return missing


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of every absolute import in a module, those inside functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_tracked_files_are_small_and_name_no_machine_or_registry():
    assert FOREIGN.search("see " + "/work" + "/notes")
    assert not FOREIGN.search("network/layer and frame.work/")
    for path in tracked_files():
        assert path.stat().st_size < MAX_FILE_BYTES, f"{path} has {path.stat().st_size} bytes"
        found = FOREIGN.search(text_of(path) or "")
        assert found is None, f"{path} names {found[0]!r}"


def test_lock_satisfies_pyproject():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    optional = project["optional-dependencies"]
    wanted = pyproject["build-system"]["requires"] + project["dependencies"]
    wanted += optional["serve"] + optional["docs"] + optional["dev"]
    versions = pins((ROOT / "requirements.lock").read_text())
    assert unmet(wanted, versions) == []
    assert unmet(wanted, versions | {"jax": "0.4.0"}) == ["jax"]
    assert versions["jax"] == versions["jaxlib"] == "0.11.2"

    extras = pins((ROOT / "requirements-extras.lock").read_text())
    assert set(extras) == {canonicalize_name(name) for name in optional["smollm2"] + optional["deepseek"]}
    assert unmet(optional["tpu"], pins((ROOT / "requirements-tpu.lock").read_text())) == []


def test_only_the_parity_environment_pins_torch():
    holders = {str(path.relative_to(ROOT)) for path in tracked_files() if TORCH_PIN in (text_of(path) or "")}
    assert holders == {"tools/parity/requirements.txt"}
    # The peer that one benchmark times is built on PyTorch; without it that module imports and says so.
    beside_peer = ROOT / "pallas_kernels" / "bench_peers.py"
    for path in modules(PACKAGES):
        foreign = {"transformers"} if path == beside_peer else {"torch", "transformers"}
        assert not imported(ast.parse(path.read_text())) & foreign, path


def test_ci_runs_tests_then_parity():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines.index("set -euo pipefail") < lines.index("make test") < lines.index("make parity")


def test_make_test_runs_lint_types_and_every_test():
    command = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/.ready", "test"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    recipe = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    for step in ("ruff check .", "ruff format --check .", "mypy", "mkdocs build --quiet"):
        assert any(line.endswith(step) for line in recipe.splitlines()), f"{step!r} not in\n{recipe}"
    runs = [line.partition(" -m pytest ")[2].split() for line in recipe.splitlines() if " -m pytest " in line]
    for path in (str(path.relative_to(ROOT)) for path in tracked_files() if path.name.startswith("test_")):
        holders = [run for run in runs if f"--ignore={path}" not in run and path.startswith(tuple(run))]
        assert len(holders) == 1, f"{path} is run {len(holders)} times"


def test_hooks_come_from_this_repository_only():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]


def test_find_python_believes_only_what_runs(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    broken.chmod(0o755)
    find = [str(ROOT / "tools" / "find_python.sh")]
    environment = {**os.environ, "PYTHON": str(broken)}

    found = subprocess.run([*find, "3.12"], env=environment, capture_output=True, text=True, check=True).stdout.strip()
    version = subprocess.run(
        [found, "-c", "import sys; print(sys.version_info >= (3, 12))"], capture_output=True, text=True
    )
    assert found != str(broken)
    assert version.stdout.strip() == "True"

    none = subprocess.run([*find, "9.0"], env=environment, capture_output=True, text=True, check=False)
    assert none.returncode == 1
    assert none.stdout == ""
    assert none.stderr.count("\n") == 1
    assert "no Python 9.0 or later" in none.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_one_way(package):
    for path in modules((package,)):
        foreign = imported(ast.parse(path.read_text())) & set(PACKAGES) - {package} - MAY_IMPORT[package]
        assert not foreign, f"{path} imports {foreign}"


def test_every_folder_of_modules_is_a_package():
    for path in modules(PACKAGES):
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py and would not be installed"


def test_every_public_name_has_a_docstring():
    source = """
def f(): ...
class A:
    'Doc.'
    def g(self): ...
    def _h(self): ...
    @property
    def i(self): return self.j
    @property
    def k(self):
        del self.j
        return 1
"""
    assert undocumented(ast.parse(source)) == ["f (line 2)", "A.g (line 5)", "A.k (line 10)"]
    missing = {str(path.relative_to(ROOT)): undocumented(ast.parse(path.read_text())) for path in modules(DOCUMENTED)}
    assert {path: names for path, names in missing.items() if names} == {}


def test_wheels_hold_every_file_that_is_no_module():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]["find"]["include"]) == {f"{name}*" for name in PACKAGES}
    held = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    others = [path for path in tracked_files() if path.relative_to(ROOT).parts[0] in PACKAGES and path.suffix != ".py"]
    assert [path for path in others if path not in held] == []
    assert all((ROOT / package / "py.typed") in held for package in PACKAGES)
