"""Each reader of what others wrote, with a share of the inputs of `python -m tests.fuzz`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.fuzz import pages
from tests.fuzz.__main__ import fuzz
from tests.fuzz.child import Watch, check
from tests.fuzz.readers import READERS, Reader
from tests.oracles.budget import SEED, budget

#: Cases of seed 1 that once found a fault.
REGRESSIONS = {
    "record": (6,),
    "npy": (10, 14),
    "npz": (4, 9, 17, 64),
    "infer": (26, 27, 54),
    "safetensors": (53,),
    "reduction": (32,),
    "reduction-mapping": (174, 289),
    "store": (183,),
    "trace": (2, 3, 4),
    "message": (2, 8, 9),
    "hello": (81,),
}
SLOW = ("compare", "poptorch-file", "torch", "page-of-compare", "page-of-study")


@pytest.mark.parametrize("name", READERS)
def test_broken_inputs_are_refused(name: str) -> None:
    count = budget(200 if name in SLOW else 2000, most=200)
    found = fuzz(name, SEED, 0, count)
    assert found.problems == []
    assert found.cases == count and found.ends


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_failed_is_refused(name: str) -> None:
    for number in REGRESSIONS[name]:
        assert fuzz(name, 1, number, 1).problems == []


def planted(read: object, folder: Path, errors: tuple[type[BaseException], ...] = ()) -> str:
    reader = Reader("planted", lambda draw, folder: None, read, errors, memory=1 << 20)  # type: ignore[arg-type]
    import tracemalloc

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
