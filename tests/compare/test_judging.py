"""The judge of `gpusim compare` finds what is false; no program runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.compare.judging import Judged, Said, false_of_collective, judge
from tests.compare.marks import FIRST
from tests.compare.pair import Effect, Pair, edited
from tests.compare.truth import Truth, clocks_of, instrumented, truth_of

Line = dict[str, Any]


def call(rank: int, sequence: int, number: int | None, **more: Any) -> Line:
    """A call on the group of all ranks; a message without a number."""
    line: Line = {"kind": "call", "rank": rank, "sequence": sequence, "group": "0"}
    line |= {"operation": "all_reduce", "shapes": [[3]], "operands": [["float32", [3], "equal"]]}
    return {**line, **({} if number is None else {"number": number}), **more}


def marked(rank: int, sequence: int, number: int) -> Line:
    own = {"group": f"of {rank}", "shapes": [[FIRST + number, 0]]}
    return call(rank, sequence, sequence, **own)


def write(folder: Path, lines: Sequence[Line]) -> Path:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "calls.jsonl").write_text(text)
    return folder


# ---------------------------------------------------------------- truth


def test_edit_replaces_a_marked_line_by_lines() -> None:
    program = "if x:\n    a = 1  # @a\nb = 2  # @b\n"
    assert edited(program, {"a": "a = 2\na += 1"}) == (
        "if x:\n    a = 2  # @a\n    a += 1  # @a\nb = 2  # @b\n"
    )
    assert edited(program, {"b": ""}) == "if x:\n    a = 1  # @a\n# @b\n"
    with pytest.raises(KeyError, match="lacks the marks"):
        edited(program, {"c": ""})


def test_marks_are_around_statements_of_several_lines() -> None:
    program = "for k in y:\n    if k:  # @a\n        f(  # @a\n            k\n        )\n    g()\n"
    lines = instrumented(program, {"a"}).splitlines()
    assert lines[1].endswith("mark(0)") and lines[2] == "    if k:  # @a"
    assert lines[6].endswith("mark(1)") and lines[7] == "    g()"
    assert lines[6].startswith("    __import__")


def test_block_that_goes_on_and_return_have_no_mark_behind() -> None:
    program = "def f():\n    for k in y:  # @a\n        g()\n    return 1  # @b\n"
    lines = instrumented(program, {"a", "b"}).splitlines()
    assert [line.rpartition(".")[2] for line in lines if "__import__" in line] == [
        "mark(0)",
        "mark(2)",
    ]


def test_clocks_join_collectives_and_messages() -> None:
    """Rank 0 sends after a collective; rank 1 receives after a call of its own."""
    calls = {
        0: [call(0, 0, 0), call(0, 1, None, operation="send", peer=1)],
        1: [
            call(1, 0, 0),
            call(1, 1, 0, group="1"),
            call(1, 2, None, operation="recv", peer=0),
        ],
        2: [call(2, 0, 0)],
    }
    clocks = clocks_of(calls)
    assert clocks[0] == [(1, 1, 1), (2, 1, 1)]
    assert clocks[1] == [(1, 1, 1), (1, 2, 1), (2, 3, 1)]


def test_calls_in_no_common_order_are_refused() -> None:
    calls = {0: [call(0, 0, 0), call(0, 1, 1)], 1: [call(1, 0, 1), call(1, 1, 0)]}
    with pytest.raises(ValueError, match="no order"):
        clocks_of(calls)


def test_truth_counts_calls_without_marks(tmp_path: Path) -> None:
    lines = [call(0, 0, 0), marked(0, 1, 0), call(0, 2, 1), marked(0, 3, 1), marked(0, 4, 0)]
    truth = truth_of(write(tmp_path / "record", lines), {"update"})
    assert truth.begins["update", 0] == [1, 2]
    assert truth.ends["update", 0] == [2, 2]
    assert [truth.begun(Effect("update"), 0, k) for k in (0, 1)] == [False, True]
    assert [truth.over(Effect("update"), 0, k) for k in (0, 1)] == [False, False]
    with pytest.raises(LookupError):
        truth.begun(Effect("update", 2), 0, 0)


# ---------------------------------------------------------------- the judge

#: Two ranks; each step has a sum of gradients, and behind the update a sum of losses.
TRUTH = Truth(
    begins={("update", rank): [1, 3] for rank in (0, 1)},
    ends={("update", rank): [1, 3] for rank in (0, 1)},
    clocks={rank: [(k + 1, k + 1) for k in range(4)] for rank in (0, 1)},
)
PAIR = Pair("rate", "", "by_hand.py", ("optimizer",), {"rate": ""}, Effect("update"))
TEXT = "At or before train.py:9; equal at train.py:9. The words."


def place(sequence: int) -> dict[str, Any]:
    return {
        name: {"site": "train.py:9", "rank": 0, "sequence": sequence, "operation": "all_reduce"}
        for name in "ab"
    }


def verdict(**more: Any) -> dict[str, Any]:
    interval = {"kind": "turn", "until": place(2), "after": place(0)}
    cause = {"class": "optimizer", "certainty": "consistent", "words": "The words."}
    found = {"kind": "operands", "interval": interval, "cause": cause, "ranks": [0, 1]}
    return {**found, "a": {"group": "0", "number": 2}, "b": {"group": "0", "number": 2}, **more}


@pytest.fixture
def records(tmp_path: Path) -> Mapping[str, Path]:
    """Records in which the operands of call 2 differ on both ranks."""
    found = {}
    for name in "ab":
        lines = [call(rank, k, k) for k in range(4) for rank in (0, 1)]
        for line in lines:
            if line["sequence"] == 2:
                line["operands"] = [["float32", [3], name]]
        found[name] = write(tmp_path / name, lines)
    return found


def judged(
    records: Mapping[str, Path], found: dict[str, Any] | None, pair: Pair = PAIR, **more: Any
) -> Judged:
    said = {"text": TEXT, "codes": (1, 1), **more}
    whole = {"equal": found is None, "verdict": found}
    return judge(pair, Said(whole, **said), records, {"a": TRUTH, "b": TRUTH})


def test_true_claim_is_right(records: Mapping[str, Path]) -> None:
    found = judged(records, verdict())
    assert (found.word, found.false, found.mismatches) == ("right", [], [])


@pytest.mark.parametrize(
    ("kind", "until", "after", "text"),
    [
        ("turn", 3, 1, "is before"),  # after the logged loss: the first finding of strangers
        ("until", 0, None, "is behind"),
        ("call", 2, None, "is not the call"),
    ],
)
def test_false_place_is_found(
    records: Mapping[str, Path], kind: str, until: int, after: int | None, text: str
) -> None:
    interval: dict[str, Any] = {"kind": kind, "until": place(until)}
    if after is not None:
        interval["after"] = place(after)
    found = judged(records, verdict(interval=interval))
    assert found.word == "FALSE" and any(text in sentence for sentence in found.false)


def test_lower_bound_that_differs_is_found(records: Mapping[str, Path]) -> None:
    interval = {"kind": "turn", "until": place(3), "after": place(2)}
    pair = Pair("rate", "", "by_hand.py", ("optimizer",), {"rate": ""}, Effect("update", 1))
    found = judged(records, verdict(interval=interval), pair)
    assert any("is not equal" in sentence for sentence in found.false)


def test_false_ranks_are_found(records: Mapping[str, Path]) -> None:
    found = judged(records, verdict(ranks=[1]))
    assert found.false == ["operands differ on the ranks [0, 1], not on [1]"]


def test_false_proof_is_found_and_a_false_guess_is_not(records: Mapping[str, Path]) -> None:
    cause = {"class": "data", "certainty": "consistent", "words": "The words."}
    assert judged(records, verdict(cause=cause)).word == "class"
    assert judged(records, verdict(cause={**cause, "certainty": "proven"})).word == "FALSE"


def test_claims_are_compared(records: Mapping[str, Path]) -> None:
    pair = Pair(**{**vars(PAIR), "claims": {"factor": 4.0}})
    found = deepcopy(verdict())
    assert judged(records, found, pair).word == "class"
    found["cause"]["factor"] = 4.0
    assert judged(records, found, pair).word == "right"


def test_equal_runs_that_are_not_and_the_reverse_are_found(records: Mapping[str, Path]) -> None:
    assert judged(records, None, codes=(0, 0)).word == "FALSE"
    equal = Pair("same", "", "by_hand.py")
    assert judged(records, None, equal, codes=(0, 0)).word == "right"
    assert judged(records, verdict(), equal).word == "FALSE"


@pytest.mark.parametrize(
    "more",
    [{"codes": (0, 1)}, {"codes": (1, 0)}, {"text": "At train.py:9."}, {"text": "The words."}],
)
def test_mismatch_of_text_and_json_is_found(
    records: Mapping[str, Path], more: dict[str, Any]
) -> None:
    assert judged(records, verdict(), **more).word == "mismatch"


def test_collective_that_is_not_the_first_is_found(tmp_path: Path) -> None:
    """Runs of one text: results of call 1 differ, and nothing before."""
    records = {}
    for name in "ab":
        results = [["float32", [3], "equal"]], [["float32", [3], name]], [["float32", [3], name]]
        lines = [call(0, k, k) for k in range(3)]
        lines += [
            {"kind": "result", "calls": [[0, k]], "results": each} for k, each in enumerate(results)
        ]
        records[name] = write(tmp_path / name, lines)
    right = {"kind": "call", "until": place(1)}
    assert false_of_collective(right, records) == []
    for wrong in (0, 2):
        assert false_of_collective({**right, "until": place(wrong)}, records)
