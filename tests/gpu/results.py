"""The results of `make gpu`: one JSON object a line, written as soon as it is known.

Every line has `step` and `key`; the key stands for the sources, the GPU and the versions, so that a
later run knows which results are its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["FILE", "KEY", "PASSED", "STEP", "append", "key_of", "record", "records"]

ROOT = Path(__file__).parents[2]
# Variables of the environment of every command.
FILE, KEY, STEP = "GPUSIM_GPU_RESULTS", "GPUSIM_GPU_KEY", "GPUSIM_GPU_STEP"
PASSED = "GPUSIM_GPU_PASSED"  # a file with the ids of the tests that have passed
SOURCES = ("gpusim", "fallback", "tests", "bench")


def record(**what: Any) -> None:
    """Append a line to the results of the step that this process runs for; nothing without one."""
    if FILE in os.environ:
        append(Path(os.environ[FILE]), step=os.environ[STEP], key=os.environ[KEY], **what)


def append(path: Path, **what: Any) -> None:
    """Append a line in one write: lines of several processes do not mix."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(what, default=str).encode() + b"\n")


def records(path: Path, key: str) -> list[dict[str, Any]]:
    """The lines of this key, the oldest first; a line that was cut is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and one.get("key") == key:
            found.append(one)
    return found


def key_of(*about: object) -> str:
    """A digest of the sources' content and of what is given; a commit says less of a dirty tree."""
    digest = hashlib.sha256(repr(about).encode())
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp", ".txt", ".pyx"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
