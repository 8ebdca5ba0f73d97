"""bench.gpu: what it says without a GPU, and what it makes of what it measures.
On the stand-in for CuPy, whose speed means nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu, machine
from bench.timing import Timing
from tests.cuda import device_arrays


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for CuPy, which needs no compiler of CUDA, with a pool and a clock's wait."""
    with device_arrays.installed():
        cupy = sys.modules["cupy"]
        pool = SimpleNamespace(free_all_blocks=lambda: None)
        monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool, raising=False)
        monkeypatch.setattr(cupy.cuda.Device, "synchronize", lambda self: None, raising=False)
        yield cupy


def test_without_cupy_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu.main([]) == 1
    assert "gpusim[cuda13]" in capsys.readouterr().err


def test_without_a_gpu_the_reason_is_cudas(stand_in: Any, capsys: Any) -> None:
    def none() -> int:
        raise RuntimeError("cudaErrorNoDevice")

    stand_in.cuda.runtime.getDeviceCount = none
    assert gpu.main([]) == 1
    assert "CuPy finds no GPU: cudaErrorNoDevice" in capsys.readouterr().err


def test_every_target_is_measured_and_judged(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["--shift", "15", "--seconds", "0", "--json", str(path), "--without", "JAX"]
    assert gpu.main(arguments) == 0
    found = json.loads(path.read_text())
    assert found["gpu"]["name"] == "Stand-in GPU" and found["machine"]["packages"]["numpy"]
    assert len(found["cases"]) == len(gpu.all_cases())
    assert all(case["bits"] == "equal" for case in found["cases"])
    for case in found["cases"]:
        assert {"gpusim", "copy"} <= case["entries"].keys()
        assert case["entries"]["copy"]["fraction"] == 1 and case["moved"] > 0
        assert case["error"] is None and case["entries"]["gpusim"]["host"] > 0
    bounds = {verdict["description"]: verdict["target"] for verdict in found["targets"]}
    of_the_copy = sorted(bounds[what] for what in bounds if "of the copy" in what)
    assert of_the_copy == [f"≥ {x}" for x in (0.12, 0.25, 0.3, 0.4, 0.5, 0.5, 0.8, 0.8, 0.8, 0.85)]
    assert bounds["fold, 8 to 256 replicas, of the copy"] == "≥ 0.85"
    assert bounds["65,536 replicas of 64 Ki, of the copy"] == "≥ 0.8"
    assert bounds["µs of a fold's launch, beyond `x + y`"] == "≤ 20"
    sizes = {(case["replicas"], case["elements"]) for case in found["cases"]}
    assert len(sizes) > 4
    printed = capsys.readouterr().out
    assert "65,536 replicas of 16 Ki" in printed and "every case has the CPU's bits" in printed
    assert "torch: ModuleNotFoundError" in printed or "torch" in found["gpu"]["packages"]


def outcome(name: str, fraction: float, seconds: float = 1.0, **changes: Any) -> gpu.GpuOutcome:
    case = next(case for case in gpu.all_cases() if case.name == name)
    entries = {
        "gpusim": gpu.GpuEntry(Timing(seconds, seconds, 5), 0.1, seconds, fraction),
        "CuPy": gpu.GpuEntry(Timing(2 * seconds, 2 * seconds, 5), 0.1, 2 * seconds, fraction / 2),
    }
    given: dict[str, Any] = {
        "case": name,
        "dtype": case.dtype,
        "replicas": 64,
        "elements": 8,
        "row": case.row,
        "target": case.target,
        "kind": case.kind,
        "moved": 64,
        "entries": entries,
        "problems": {},
        "bits": "equal",
    }
    return gpu.GpuOutcome(**{**given, **changes})


def test_the_worst_case_decides() -> None:
    outcomes = [
        outcome("float32 linear", 0.9),
        outcome("float16 tree", 0.8),
        outcome("ragged rows of 64 B", 0.6),
        outcome("65,536 replicas of 64 Ki", 0.5, seconds=1.2),
        outcome("64 replicas of as much as 65,536 replicas of 64 Ki", 0.6, seconds=1.0),
        outcome("float8_e5m2 linear stochastic at every step", 0.11, bits="DIFFERENT"),
    ]
    overhead = {"fold": 35.0, "x + y": 10.0, "psum": 90.0}
    verdicts = {v.description: v for v in gpu.judge(outcomes, overhead)}
    launch = verdicts["µs of a fold's launch, beyond `x + y`"]
    assert (launch.ratio, launch.met) == (25, False)
    fold = verdicts["fold, 8 to 256 replicas, of the copy"]
    assert (fold.ratio, fold.met, fold.basis) == (0.8, False, "float16 tree")
    assert verdicts["ragged rows of 64 B, of the copy"].met
    assert verdicts["fold, 8-bit inputs, stochastic at every step, of the copy"].met is False
    assert verdicts["65,536 replicas of 64 Ki, of 64 replicas of as much"].met is False
    assert verdicts["sums, than CuPy's"].ratio == 2 and verdicts["sums, than CuPy's"].met
    assert verdicts["sums, than JAX's"].met is None
    assert verdicts["every case has the CPU's bits"].met is False


def test_segments_of_very_different_lengths_fill_all_rows() -> None:
    segments = gpu.ragged_segments(64, 1000)
    assert segments[:, 4].sum() > 0.95 * 64 * 1000
    assert segments[:, 4].max() > 20 * segments[:, 4].min()
    for column, first in ((0, 1), (2, 3)):
        for replica in range(64):
            own = segments[segments[:, column] == replica]
            own = own[own[:, first].argsort()]
            ends = own[:, first] + own[:, 4]
            assert (ends[:-1] <= own[1:, first]).all() and (ends <= 1000).all()


def test_a_case_that_fails_is_recorded_and_the_others_go_on(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    prepare, freed = gpu.prepare, []

    def failing(case: gpu.GpuCase, *arguments: Any) -> gpu.Prepared:
        if case.name == "float32 tree":
            raise ValueError("Unsupported dtype")
        return prepare(case, *arguments)

    monkeypatch.setattr(gpu, "prepare", failing)
    pool = SimpleNamespace(free_all_blocks=lambda: freed.append(1))
    monkeypatch.setattr(stand_in, "get_default_memory_pool", lambda: pool)
    path = tmp_path / "gpu.json"
    assert gpu.main(["--shift=15", "--seconds=0", f"--json={path}", "--only=float32"]) == 1
    found = {case["case"]: case for case in json.loads(path.read_text())["cases"]}
    assert found["float32 tree"]["error"] == "ValueError: Unsupported dtype"
    assert found["float32 tree"]["bits"] == "not compared"
    assert found["float32 ring"]["bits"] == "equal"  # the case behind it
    assert len(freed) == len(found)
    printed = capsys.readouterr().out
    assert "float32 tree: FAILED: ValueError: Unsupported dtype" in printed


def test_a_run_that_was_cut_goes_on_where_it_was(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured, real = tmp_path / "gpu.json", [], gpu.attempt
    cut = ["float32 linear"]
    only = ["--shift=15", "--seconds=0", f"--json={path}", "--only=float32", "--without=JAX"]

    def attempt(case: gpu.GpuCase, *arguments: Any) -> gpu.GpuOutcome:
        if case.name in cut:
            raise KeyboardInterrupt
        measured.append(case.name)
        return real(case, *arguments)

    monkeypatch.setattr(gpu, "attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*only, "--key=mine"])
    first = measured.copy()
    content = json.loads(path.read_text())
    assert [case["case"] for case in content["cases"]] == first
    content["cases"][1]["bits"] = "DIFFERENT"  # it is measured again
    path.write_text(json.dumps(content))
    cut.clear()
    assert gpu.main([*only, "--key=mine"]) == 0
    again = measured[len(first) :]
    names = [case.name for case in gpu.all_cases() if "float32" in case.name]
    assert sorted([*first, *again]) == sorted([*names, first[1]])
    found = json.loads(path.read_text())
    assert sorted(case["case"] for case in found["cases"]) == sorted(names)
    assert content["cases"][0] in found["cases"] and len(found["targets"]) > 5
    measured.clear()
    cut.append(first[0])
    with pytest.raises(KeyboardInterrupt):  # the first case is measured: those were of others
        gpu.main([*only, "--key=other"])
    assert not measured


def test_the_telling_cases_come_first() -> None:
    names = [case.name for case in gpu.all_cases()]
    assert {*names[: len(gpu.TELLING)]} == {*gpu.TELLING} and len({*names}) == len(names)


def test_a_call_is_timed_behind_a_delay_and_queued_without_waiting(stand_in: Any) -> None:
    timer = gpu.Timer(stand_in, shift=20)
    events: list[str] = []
    wait = timer.wait
    timer.wait = lambda: (events.append("wait"), wait())[1]
    sample = timer._sample
    timer._sample = lambda call: (events.append("sample"), sample(call))[1]
    timer.measure(lambda: events.append("call"), seconds=0)
    rounds = "".join({"wait": "w", "call": "c", "sample": "s"}[event] for event in events)
    # Warm up; one alone; three rounds of many; then samples, each with a call and none with a wait.
    assert re.fullmatch(r"cwcw(c{3,}w){3}(s+)(sc){7}", rounds), rounds
    assert timer._units >= 2


def test_the_commit_can_be_given_where_there_is_no_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUSIM_COMMIT", "abc123")
    assert machine.commit() == "abc123"
