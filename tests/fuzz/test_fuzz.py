"""Each reader of what others wrote, with a share of the inputs of `python -m tests.fuzz`."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest

from tests.fuzz import pages
from tests.fuzz.__main__ import fuzz
from tests.fuzz.child import Watch, check
from tests.fuzz.readers import READERS, Reader
from tests.oracles.budget import FULL, SEED, budget

#: Inputs that once were found, as files: what the generator makes for a number may change.
REGRESSIONS = json.loads((Path(__file__).parent / "regressions.json").read_text())
SLOW = ("compare", "poptorch-file", "torch", "page-of-compare", "page-of-study")
#: Quick runs repeat cases that have passed; `make test-all` draws others for each commit.
DRAWN = SEED if FULL else 2


@pytest.mark.parametrize("name", READERS)
def test_broken_inputs_are_refused(name: str) -> None:
    count = budget(30 if name in SLOW else 2000, most=100)
    found = fuzz(name, DRAWN, 0, count)
    assert found.problems == []
    assert found.cases == count and found.ends


@pytest.mark.parametrize("number", range(len(REGRESSIONS)))
def test_what_once_failed_is_refused(number: int, tmp_path: Path) -> None:
    found = REGRESSIONS[number]
    reader = READERS[found["reader"]]
    for name, text in found["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(zlib.decompress(base64.b64decode(text)))
    # The first uses import and cache: their files and memory do not count as a case's.
    with contextlib.suppress(*reader.errors):
        reader.read(tmp_path)
    tracemalloc.start()
    try:
        ended, problem, _ = check(reader, WATCH, tmp_path)
    finally:
        tracemalloc.stop()
    assert problem == ""
    assert ended in ("read", "refused")


def planted(read: object, folder: Path, errors: tuple[type[BaseException], ...] = ()) -> str:
    reader = Reader("planted", lambda draw, folder: None, read, errors, memory=1 << 20)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        return check(reader, WATCH, folder)[1]
    finally:
        tracemalloc.stop()


WATCH = Watch()


def test_planted_faults_are_found(tmp_path: Path) -> None:
    import pickle

    case, outside = tmp_path / "case", tmp_path / "outside"
    case.mkdir()
    (case / "x").write_bytes(pickle.dumps(Path("a")))
    assert "outside of the folder" in planted(lambda _: outside.write_text("x"), case)
    assert planted(lambda folder: (folder / "y").write_text("x"), case) == ""
    assert "pickle.find_class" in planted(lambda f: pickle.loads((f / "x").read_bytes()), case)
    assert "took 8 MiB" in planted(lambda _: bytearray(8 << 20), case)
    assert "ZeroDivisionError" in planted(lambda _: 1 // 0, case)
    assert planted(lambda _: 1 // 0, case, (ZeroDivisionError,)) == ""

    def silent(_: Path) -> None:
        raise ValueError

    assert planted(silent, case, (ValueError,)) == "an error without a text"


@pytest.mark.parametrize(
    "text",
    [
        "<p><script>alert(1)</script></p>",
        "<p onclick='x'>",
        "<img src='http://elsewhere'>",
        "<td class='a' data-x='1'>",
        "<svg><script/></svg>",
    ],
)
def test_planted_elements_are_found(text: str) -> None:
    with pytest.raises(AssertionError):
        pages.check_page(text)
    pages.check_page("<p class='a'>&lt;script&gt;</p>")


def test_a_case_can_be_repeated(tmp_path: Path) -> None:
    reader = READERS["record"]
    made = []
    for name in "ab":
        (tmp_path / name).mkdir()
        reader.make(random.Random("record 1 6"), tmp_path / name)
        made.append({p.name: p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()})
    assert made[0] == made[1] and made[0]
    assert sys.getrecursionlimit() == 1000
