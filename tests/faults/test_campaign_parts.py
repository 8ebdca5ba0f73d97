"""The parts of campaigns that run nothing: drawing, verdicts, shrinking, reports, options."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.tools.cli import main
from gpusim.tools.faults.campaign import Campaign, Judged
from gpusim.tools.faults.command import repeating
from gpusim.tools.faults.drawing import draw, draw_plans
from gpusim.tools.faults.folders import check_size, copy_folder, digests, stamps
from gpusim.tools.faults.observations import Observation, Problem
from gpusim.tools.faults.report import again, as_json, sentences, table, write
from gpusim.tools.faults.settings import Settings, read
from gpusim.tools.faults.shrinking import MOST_RUNS, shrink
from gpusim.tools.faults.verdicts import (
    VERDICTS,
    WORDS,
    Reference,
    Verdict,
    judge,
    reference_of,
)
from gpusim.tools.options import UsageError
from gpusim.tools.torchrun import options_of
from gpusim.torch.distributed.faults.plans import KINDS, Fault, PlanError, parse, plan_text
from gpusim.torch.distributed.faults.watching import Seen
from tests.oracles.budget import budget


def call(operation: str, site: str, *tensors: tuple[str, int]) -> dict[str, Any]:
    return {"operation": operation, "site": site, "tensors": list(tensors)}


def seen() -> list[Seen]:
    """Two ranks of a program with every kind of thing that a fault can disturb."""
    calls = [call("barrier", "a.py:1"), call("broadcast", "a.py:2", ("int64", 1), ("float32", 0))]
    calls += [call("all_reduce", "a.py:3", ("bfloat16", 10))] * 40
    return [Seen(calls, ["w.pt", "x.pt"], ["key"]), Seen(calls[:30], [], ["key", "other"])]


# ---------------------------------------------------------------- drawing


def test_plans_of_a_seed_are_these_everywhere() -> None:
    plans = draw_plans(Settings(7, fewest=1, most=2), seen(), 6, restarts=1)
    assert [plan_text(plan) for plan in plans] == PLANS


PLANS = [
    "flip rank=1 call=27 bit=2 element=4",
    "missing rank=0 write=1",
    "missing rank=0 write=2",
    "missing rank=0 write=1",
    "raise rank=1 call=10",
    "late rank=1 call=23 seconds=7200, torn rank=0 write=2 bytes=1",
]


def test_a_longer_campaign_begins_with_the_same_plans() -> None:
    how = Settings(3)
    assert draw_plans(how, seen(), 20, 0)[:8] == draw_plans(how, seen(), 8, 0)
    assert draw_plans(how, seen(), 20, 0) != draw_plans(Settings(4), seen(), 20, 0)


@given(seed=st.integers(0, 2**63 - 1), number=st.integers(0, 10**6), restarts=st.integers(0, 2))
@settings(max_examples=budget(400), deadline=None)
def test_drawn_faults_fit_the_program(seed: int, number: int, restarts: int) -> None:
    ranks = seen()
    plan = draw(Settings(seed, fewest=1, most=3), number, ranks, restarts)
    assert 1 <= len(plan) <= 3
    assert parse(plan_text(plan)) == plan
    assert plan[0].attempt == 0
    for fault in plan:
        own = ranks[fault.rank]
        assert fault.attempt <= restarts
        assert fault.write is None or 1 <= fault.write <= len(own.writes)
        assert fault.wait is None or 1 <= fault.wait <= len(own.waits)
        if fault.call is None:
            continue
        tensors = own.calls[fault.call - 1]["tensors"]
        if fault.kind in ("flip", "flip-result", "nan"):
            dtype, elements = tensors[fault.tensor or 0]
            assert (fault.element or 0) < elements
            assert (fault.bit or 0) < {"int64": 64, "bfloat16": 16}[dtype]
            assert fault.kind != "nan" or dtype == "bfloat16"


def test_all_kinds_ranks_and_places_are_drawn() -> None:
    faults = [fault for plan in draw_plans(Settings(1), seen(), 600, 0) for fault in plan]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.rank for fault in faults} == {0, 1}
    # A place that is called once among forty calls is not lost.
    assert {1, 2} <= {fault.call for fault in faults if fault.kind == "kill"}


def test_kinds_that_fit_nothing_are_an_error() -> None:
    bare = [Seen([call("barrier", "a.py:1")], [], [])]
    assert draw(Settings(1, ("torn", "kill")), 0, bare)[0].kind == "kill"
    with pytest.raises(ValueError, match="kinds=torn,nan: no such fault can happen"):
        draw(Settings(1, ("torn", "nan")), 0, bare)


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed=x", "seed='x': expected a whole number from 0"),
        ("seed=99999999999999999999", "expected a whole number"),
        ("kinds=kill", "seed= is missing"),
        ("seed=1 kinds=kil", "did you mean 'kill'"),
        ("seed=1 faults=0", "faults='0': expected a number from 1"),
        ("seed=1 faults=3..2", "expected a number from 1"),
        ("seed=1 seed=2", "seed= was given before"),
        ("seed=1 run=3", "expected seed=S, kinds="),
        ("seed=1 kill", "'kill': expected seed=S"),
    ],
)
def test_wrong_settings(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        read(text)


@pytest.mark.parametrize("text", ["seed=7", "seed=0 kinds=kill,nan", "seed=3 faults=1..3"])
def test_settings_are_their_text(text: str) -> None:
    assert str(read(text)) == text


# ---------------------------------------------------------------- verdicts

BITS = {rank: {"weights": f"w{rank}", "states": f"s{rank}"} for rank in range(2)}
USUAL = Observation(0, lines={0: "loss 1"}, bits=BITS, files={"w.pt": "f"})
KILL = Fault("kill", rank=1, call=5)
FLIP = Fault("flip", rank=1, call=5, bit=3)
KILLED = Problem(0, 1, "was ended by SIGKILL", "")


def verdict(fault: Fault = KILL, checked: bool = False, **changes: Any) -> Verdict:
    found = replace(USUAL, happened=((fault, "a.py:3"),), **changes)
    return judge(Reference(USUAL), found, checked)


def test_the_same_bits_are_recovered() -> None:
    assert verdict(attempts=2, problems=(KILLED,)).name == "recovered"
    assert verdict(attempts=2).why.endswith("after 1 restart")
    assert verdict(FLIP).name == "recovered"
    assert verdict(files={"w.pt": "f", "left.part": "x"}).name == "recovered"


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"bits": {**BITS, 1: {"weights": "x", "states": "s1"}}}, "the weights of rank 1 differ"),
        ({"bits": {**BITS, 0: {"weights": "w0", "states": "x"}}}, "state of rank 0 differs"),
        ({"bits": {0: BITS[0]}}, "the weights of rank 1 differ"),
        ({"lines": {0: "loss 2"}}, "rank 0 prints 'loss 2', not 'loss 1'"),
        ({"lines": {}}, "rank 0 prints '', not 'loss 1'"),
        ({"files": {"w.pt": "g"}}, "the file w.pt differs"),
        ({"files": {}}, "the file w.pt is not there"),
    ],
)
def test_other_results_without_an_error_are_different(changes: dict[str, Any], why: str) -> None:
    found = verdict(**changes)
    assert (found.name, why in found.why) == ("different", True), found


def test_no_fault_has_no_effect() -> None:
    assert judge(Reference(USUAL), replace(USUAL, code=1)).name == "no effect"


def test_ranks_that_cannot_go_on_are_hung() -> None:
    assert verdict(code=1, hung="no rank can go on").name == "hung"
    assert verdict(code=137, expired=True).name == "hung"


@pytest.mark.parametrize(
    "kind, problems, name",
    [
        ("kill rank=1 call=5", [KILLED], "named"),
        ("kill rank=1 call=5", [replace(KILLED, rank=0, how="raised KeyError")], "unnamed"),
        (
            "kill rank=1 call=5",
            [replace(KILLED, rank=0, message="Connection closed by peer [127.0.0.1]:40001")],
            "named",
        ),
        ("kill rank=1 call=5", [], "unnamed"),
        ("hang rank=1 call=5", [Problem(0, 0, "raised X", "Timed out waiting 3000ms")], "named"),
        ("hang rank=1 call=5", [Problem(0, 0, "raised IndexError", "5")], "unnamed"),
        ("nan rank=1 call=5", [Problem(0, 0, "raised ValueError", "loss is nan")], "named"),
        ("nan rank=1 call=5", [Problem(0, 0, "raised IndexError", "5")], "unnamed"),
        ("nan rank=1 call=5", [Problem(0, 1, "was ended by SIGSEGV", "")], "named"),
        ("flip rank=1 call=5 bit=3", [Problem(0, 0, "raised UnpicklingError", "")], "named"),
        ("torn rank=1 write=1", [Problem(0, 0, "raised EOFError", "")], "named"),
        # The one of the agent's SIGTERM says nothing of the fault.
        ("hang rank=1 call=5", [Problem(0, 0, "timed out", "", by_agent=True)], "unnamed"),
    ],
)
def test_errors_that_name_the_fault(kind: str, problems: list[Problem], name: str) -> None:
    found = verdict(parse(kind)[0], code=1, problems=tuple(problems))
    assert found.name == name, found


def test_the_error_of_the_last_start_counts() -> None:
    later = Problem(1, 0, "raised KeyError", "'step'")
    found = verdict(code=1, attempts=2, problems=(KILLED, later))
    assert found == Verdict("unnamed", "start 2 fails: rank 0 raised KeyError 'step'")
    torn = parse("torn rank=1 write=1")[0]
    later = Problem(1, 0, "raised RuntimeError", "PytorchStreamReader failed reading zip archive")
    assert verdict(torn, code=1, attempts=2, problems=(KILLED, later)).name == "named"


def test_findings_name_silent_faults() -> None:
    finding = "replicas-differ: rank 1 has other weights"
    found = verdict(FLIP, checked=True, code=1, findings=(finding,))
    assert found == Verdict("named", f"found by --check: {finding}")
    # One that the program has without faults says nothing of them.
    usual = replace(USUAL, findings=(finding,), code=1)
    found = replace(usual, happened=((FLIP, ""),), lines={0: "loss 2"})
    assert judge(Reference(usual), found, True).name == "different"
    assert judge(Reference(usual), replace(found, lines=USUAL.lines), True).name == "recovered"


def test_results_that_change_by_themselves_are_not_compared() -> None:
    second = replace(USUAL, lines={0: "loss 2"}, files={"w.pt": "g"}, bits={0: BITS[0], 1: {}})
    found = reference_of(USUAL, second)
    assert found.changing == (
        "the last line of rank 0",
        "the weights of rank 1",
        "the optimizer's state of rank 1",
        "the file w.pt",
    )
    assert judge(found, replace(second, happened=((FLIP, ""),))).name == "recovered"


def test_each_kind_has_words() -> None:
    assert set(WORDS) == set(KINDS)


# ---------------------------------------------------------------- shrinking


def test_a_plan_is_made_small() -> None:
    runs = []

    def holds(plans: Any) -> list[bool]:
        runs.extend(plans)
        return [any(f.rank == 1 and (f.call or 0) >= 17 for f in plan) for plan in plans]

    plan = parse(
        "flip rank=0 call=3 bit=2, late rank=1 call=300 seconds=60, torn rank=2 write=1 bytes=0"
    )
    assert plan_text(shrink(plan, holds)) == "kill rank=1 call=17"
    assert len(runs) == len(set(runs)) <= MOST_RUNS


@given(seed=st.integers(0, 10**6), together=st.integers(1, 5))
@settings(max_examples=budget(60), deadline=None)
def test_a_small_plan_holds(seed: int, together: int) -> None:
    plan = draw(Settings(seed, fewest=1, most=4), 0, seen(), 1)

    def holds(plans: Any) -> list[bool]:
        return [sum(map(hash, map(str, each))) % 3 == 0 or each == plan for each in plans]

    found = shrink(plan, holds, together)
    assert found == plan or holds([found]) == [True]


def test_many_at_a_time_give_the_same() -> None:
    def holds(plans: Any) -> list[bool]:
        return [any((f.call or 0) >= 9 for f in plan) for plan in plans]

    plan = parse("nan rank=1 call=30 element=7, exit rank=0 call=25 code=3")
    assert shrink(plan, holds, 1) == shrink(plan, holds, 7)


# ---------------------------------------------------------------- folders


def test_files_that_a_run_has_written_are_compared(tmp_path: Path) -> None:
    home, own = tmp_path / "home", tmp_path / "own"
    (home / "data").mkdir(parents=True)
    for name in ("a.txt", "data/b.txt", ".hidden"):
        (home / name).write_text("before")
    copy_folder(home, own)
    before = stamps(own)
    assert sorted(before) == ["a.txt", "data/b.txt"]
    assert digests(own, before) == {}
    (own / "data" / "b.txt").write_text("after that")
    (own / "c.txt").write_text("before")
    assert sorted(digests(own, before)) == ["c.txt", "data/b.txt"]
    assert (home / "data" / "b.txt").read_text() == "before"


def test_a_large_folder_is_not_copied(tmp_path: Path) -> None:
    check_size(tmp_path)
    (tmp_path / "data.bin").write_bytes(bytes(5 << 20))
    with pytest.raises(UsageError, match=r"more than 4 MiB or 500 files; write \{folder\}"):
        check_size(tmp_path)


# ---------------------------------------------------------------- report and options


def campaign() -> Campaign:
    names = ["named", "different", "hung", "recovered", "different"]
    judged = [
        Judged((Fault("kill", 0, call=n),), Verdict(name, f"why {n}"), "me/a.py:3")
        for n, name in enumerate(names, 1)
    ]
    judged.append(Judged(parse("kill rank=0 call=1, hang rank=0 call=2"), Verdict("named", "x")))
    return Campaign(2, Reference(USUAL, ("the file log",)), judged, judged[1], judged[1])


def test_the_table_and_the_sentences() -> None:
    headings, rows = table(campaign())
    assert headings == ["fault", *VERDICTS, "plans"]
    assert rows[0] == ["kill", "2", "1", "", "1", "1", "", "5"]
    assert rows[1] == ["several", "", "", "", "1", "", "", "1"]
    assert rows[2] == ["all", "2", "1", "", "2", "1", "", "6"]
    text = "\n".join(sentences(campaign(), "gpusim torchrun --faults {plan} --runs 1 a.py"))
    assert "different:\n  kill rank=0 call=2: why 2\n  kill rank=0 call=5: why 5" in text
    assert "gpusim torchrun --faults 'kill rank=0 call=2' --runs 1 a.py" in text
    assert "the file log" in text


def test_json_and_the_page(tmp_path: Path) -> None:
    made = as_json(campaign(), "seed=7", "x {plan}")
    assert made["verdicts"] == {"named": 2, "different": 2, "hung": 1, "recovered": 1}
    assert made["plans"][0] == {
        "plan": "kill rank=0 call=1",
        "verdict": "named",
        "why": "why 1",
        "site": "me/a.py:3",
        "starts": 1,
    }
    assert made["smallest"]["command"] == "x 'kill rank=0 call=2'"
    page = write(campaign(), "a.py", "x {plan}", tmp_path / "page.html").read_text()
    assert "kill rank=0 call=5" in page and "me/a.py:3" in page


def test_the_command_that_repeats() -> None:
    words = ["--nproc-per-node", "4", "--max-restarts", "2", "--check", "--seed", "3"]
    options = options_of([*words, "--faults", "seed=1", "a b.py", "--to", "{folder}", "x y"])
    line = again(repeating(options, 4), campaign().judged[0])
    assert line == (
        "gpusim torchrun --nproc-per-node 4 --max-restarts 2 --seed 3 --check "
        "--faults 'kill rank=0 call=1' --runs 1 'a b.py' --to {folder} 'x y'"
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["--runs", "3"], "--runs 3: expected --faults"),
        (["--json", "x.json"], "--json x.json: expected --faults"),
        (["--jobs", "2", "--faults", "kill rank=0 call=1"], "--jobs 2: expected --faults"),
        (["--faults", "seed=q"], "seed='q'"),
        (["--faults", "seed=1", "--threads"], "--threads"),
        (["--faults", "seed=1", "--summary"], "--summary: expected it for one run"),
        (["--faults", "seed=1", "--orders", "2"], "--orders"),
        (["--faults", "kill rank=9 call=1", "--runs", "1"], "rank=9: expected a rank below 2"),
        (["--faults", "kil rank=0 call=1", "--runs", "1"], "unknown fault 'kil'"),
        (["--faults", "seed=1", "--json", "no/such/folder.json"], "no such folder"),
    ],
)
def test_wrong_options(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a.py"
    script.write_text("")
    assert main(["torchrun", "--nproc-per-node", "2", *words, str(script)]) == 2
    assert message in capsys.readouterr().err
