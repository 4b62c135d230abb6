"""Writes requirements.lock: the closure of pyproject's requirements as installed in the environment that runs this.

    python tools/lock.py            write it
    python tools/lock.py --check    fail when the file and the environment differ

Roots are the build system, the runtime dependencies and the extras `serve`, `docs` and `dev`. Only names and versions
are written, no index and no address, so that each machine resolves them through its own configuration.
"""

import argparse
import importlib.metadata
import pathlib
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEADER = "# The exact environment of the project on Linux. Written by tools/lock.py; do not edit.\n"


def roots() -> list[Requirement]:
    """What pyproject.toml asks for, to build, run, serve, document and develop."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    texts = pyproject["build-system"]["requires"] + project["dependencies"]
    for extra in ("serve", "docs", "dev"):
        texts += project["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Versions, by canonical name, of everything that `requirements` need on this machine.

    Raises PackageNotFoundError for what is not installed, and ValueError for an installed version not asked for.
    """
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(requirement, extra) for requirement in requirements for extra in ("", *requirement.extras)]
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        distribution = importlib.metadata.distribution(name)
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise ValueError(
                f"{name} {distribution.version} is installed but {requirement} is asked for; install that first"
            )
        versions[name] = distribution.version
        for text in distribution.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                pending += [(needed, inner) for inner in ("", *needed.extras)]
    return versions


def main() -> int:
    """Writes or checks the lock file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when the file and the environment differ")
    check = parser.parse_args().check
    text = HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(closure(roots()).items()))
    if check and text != LOCK.read_text():
        print("requirements.lock differs from this environment; run python tools/lock.py", file=sys.stderr)
        return 1
    if not check:
        LOCK.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
