"""python -m tests.machines.newest PYTHON: which releases `make test-newest` tries here.

It compares this environment's packages with those of another Python's, and with the pins of
pyproject.toml: tests on a release that is no newer say nothing new.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "jax", "numpy")
LIST = "pip", "list", "--format=json", "--disable-pip-version-check"


def installed(python: str) -> dict[str, str]:
    """The versions that another Python has, without a build's label; {} if it does not run."""
    try:
        done = subprocess.run([python, "-m", *LIST], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {each["name"]: _public(each["version"]) for each in json.loads(done.stdout)}


def pinned() -> dict[str, str]:
    """The versions that the extra `test` asks for, and no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (
        re.match(r"([\w-]+)==([\d.]+)$", text) for text in project["optional-dependencies"]["test"]
    )
    return {pin[1]: pin[2] for pin in pins if pin}


def report(newest: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """
    >>> print(report({"torch": "2.99.0", "jax": "0.10.2"}, {"torch": "2.13.0", "jax": "0.10.2"}))
    torch 2.99.0, where the other tests have 2.13.0
    jax 0.10.2, THE SAME as in the other tests
    >>> print(report({"numpy": "2.4.6"}, {}))
    numpy 2.4.6; what the other tests have is not known
    """
    lines = []
    for name, version in newest.items():
        if name not in usual:
            lines.append(f"{name} {version}; what the other tests have is not known")
        elif usual[name] == version:
            lines.append(f"{name} {version}, THE SAME as in the other tests")
        else:
            lines.append(f"{name} {version}, where the other tests have {usual[name]}")
    if all(usual.get(name) == version for name, version in newest.items()):
        lines.append("NOTHING NEWER IS TESTED")
    return "\n".join(lines)


def _public(version: str) -> str:
    """
    >>> _public("2.13.0+cpu")
    '2.13.0'
    """
    return version.partition("+")[0]


def main(python: str) -> None:
    print("The newest releases that pip gives this Python:")
    here = {name: _public(metadata.version(name)) for name in PACKAGES}
    print(report(here, pinned() | installed(python)))


if __name__ == "__main__":
    main(sys.argv[1])
