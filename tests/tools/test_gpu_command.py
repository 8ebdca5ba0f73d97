"""make gpu and bench.gpu: what they say without a GPU, and what they make of what they measure.
On the stand-in for CuPy, whose speed means nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.timing import Timing
from tests.cuda import device_arrays
from tests.gpu import everything


@pytest.fixture
def stand_in() -> Iterator[Any]:
    with device_arrays.installed():
        yield sys.modules["cupy"]


@pytest.mark.parametrize("main", [gpu.main, everything.main])
def test_without_cupy_both_say_what_to_install(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main([]) == 1
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
    arguments = ["--bytes", "65536", "--seconds", "0", "--json", str(path), "--without", "JAX"]
    assert gpu.main(arguments) == 0
    found = json.loads(path.read_text())
    assert found["gpu"]["name"] == "Stand-in GPU" and found["machine"]["packages"]["numpy"]
    assert len(found["cases"]) == len(gpu.all_cases())
    assert all(case["bits"] == "equal" for case in found["cases"])
    for case in found["cases"]:
        assert {"gpusim", "copy"} <= case["entries"].keys()
        assert case["entries"]["copy"]["fraction"] == 1 and case["moved"] > 0
    bounds = [verdict["target"] for verdict in found["targets"]]
    assert bounds[:7] == ["≥ 0.85", "≥ 0.8", "≥ 0.8", "≥ 0.5", "≥ 0.4", "≥ 0.25", "≥ 0.12"]
    printed = capsys.readouterr().out
    assert "65,536 replicas of 16 Ki" in printed and "every case has the CPU's bits" in printed
    assert "torch: ModuleNotFoundError" in printed or "torch" in found["gpu"]["packages"]


def outcome(name: str, fraction: float, seconds: float = 1.0, **changes: Any) -> gpu.GpuOutcome:
    case = next(case for case in gpu.all_cases() if case.name == name)
    entries = {
        "gpusim": gpu.GpuEntry(Timing(seconds, seconds, 5), fraction),
        "CuPy": gpu.GpuEntry(Timing(2 * seconds, 2 * seconds, 5), fraction / 2),
    }
    given: dict[str, Any] = {
        "case": name,
        "dtype": case.dtype,
        "replicas": 64,
        "elements": 8,
        "row": case.row,
        "target": case.target,
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
    verdicts = {v.description: v for v in gpu.judge(outcomes)}
    fold = verdicts["fold, of the copy"]
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


def test_all_steps_are_taken_and_kept(stand_in: Any, tmp_path: Path, capsys: Any) -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> tuple[int, str]:
        asked.append(command)
        for part in command:
            if part.startswith("--junitxml="):
                Path(part.partition("=")[2]).write_text(
                    '<all><testsuite tests="7" failures="1" errors="0" skipped="2"/></all>'
                )
        if "bench.gpu" in command:
            return 0, " met  1.00 x\n MISSED 0.3 y\n"
        return int("pytest" in command), "sm_90 80 0 0 0 fold<>\nsm_90 99 8 4 4 round<>\n"

    path = tmp_path / "checks.json"
    assert everything.main(["--json", str(path)], run) == 1
    steps = {step["name"]: step for step in json.loads(path.read_text())["steps"]}
    assert steps["tests"]["passed"] is False
    assert steps["tests"]["said"] == "7 tests, 1 failures, 0 errors, 2 skipped"
    assert steps["speed"] | {"seconds": 0} == {
        "name": "speed",
        "passed": True,
        "seconds": 0,
        "said": "1 of 2 targets met",
    }
    assert steps["sanitizer"]["passed"] in (None, False)
    if steps["report"]["passed"]:
        assert steps["report"]["said"] == "2 kernels, 1 of them spill"
    assert "tests      FAILED" in capsys.readouterr().out
    assert any("tests/gpu" in command for command in asked)


def test_a_step_shows_what_it_prints_and_its_exit_code() -> None:
    code, said = everything.run([sys.executable, "-c", "print('here'); raise SystemExit(3)"])
    assert (code, said) == (3, "here\n")
