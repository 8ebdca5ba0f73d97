"""torchrun and gloo, and `gpusim torchrun --faults`, around the same death of the same rank.

A real rank ends itself as its call begins, a simulated one by the plan. Real torchrun is given
TORCH_DISABLE_SHARE_RDZV_TCP_STORE: without it, torch 2.13 gives a restart the store of the start
before, and gloo finds the addresses of ranks that are gone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .real.comparing import class_of

SCRIPT = Path(__file__).parent / "real/training.py"
RANKS = 3

#: What stands for a place in a path or a number that each start draws.
DRAWN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")


@dataclass(frozen=True)
class Death:
    """One death: how, of which rank, at which of its calls; restarts, and the script's mode."""

    how: str
    rank: int
    call: int
    restarts: int = 0
    mode: str = ""

    @property
    def plan(self) -> str:
        """The plan for gpusim."""
        code = " code=3" if self.how == "exit" else ""
        return f"{self.how} rank={self.rank} call={self.call}{code}"

    @property
    def survivors(self) -> set[str]:
        """Exit codes of survivors: after their error, or by the agent's SIGTERM before its end."""
        return {"0" if "quiet" in self.mode.split() else "1", "-15"}

    def __str__(self) -> str:
        return f"{self.plan}, {self.restarts} restarts {self.mode}".strip()


QUICK = [Death("kill", 1, 5, restarts=1), Death("exit", 2, 4, mode="record emergency")]

SLOW = [
    Death("kill", 0, 1),
    Death("kill", 0, 3, restarts=2),
    Death("kill", 0, 6),
    Death("raise", 1, 6, mode="record"),
    Death("raise", 1, 6, restarts=1, mode="record"),
    Death("exit", 1, 8, mode="quiet"),
    Death("exit", 2, 12, restarts=1),
    Death("kill", 1, 11, mode="emergency quiet"),
]


def environment(out: Path, death: Death, **more: str) -> dict[str, str]:
    """The variables of a run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    return {**kept, "OUT": str(out), "MODE": death.mode, "PYTHONWARNINGS": "ignore", **more}


def report_of(errors: str) -> tuple[tuple[str, str] | None, dict[str, str]]:
    """From a report of failures: rank and exit code of its root cause, and the codes by rank."""
    pairs = r"rank +: (\d+) \(local_rank: \d+\)\n +exitcode +: (-?\d+)"
    root = re.search(r"Root Cause \(first observed failure\):.*?" + pairs, errors, re.DOTALL)
    return root and (root[1], root[2]), dict(re.findall(pairs, errors))


def run(command: list[str], variables: dict[str, str], out: Path) -> dict[str, Any]:
    """What a run left: its exit code, report, what the ranks saw by start, and the files."""
    out.mkdir()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=out)
    root, codes = report_of(done.stderr)
    seen = {
        path.stem: dict(map(json.loads, path.read_text().splitlines()))
        for path in sorted(out.glob("*.jsonl"))
    }
    files = sorted(path.name for path in out.iterdir() if path.is_file())
    return {
        "code": done.returncode,
        "root": root,
        "codes": codes,
        "seen": seen,
        "files": files,
        "text": done.stderr,
    }


def of_real(death: Death, out: Path) -> dict[str, Any]:
    dies = f"{death.how} {death.rank} {death.call}"
    return run(
        [
            str(Path(sys.executable).with_name("torchrun")),
            "--standalone",
            f"--nproc-per-node={RANKS}",
            f"--max-restarts={death.restarts}",
            str(SCRIPT),
        ],
        environment(out, death, DIES=dies, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        out,
    )


def of_gpusim(death: Death, out: Path) -> dict[str, Any]:
    return run(
        [
            sys.executable,
            "-m",
            "gpusim.tools.cli",
            "torchrun",
            f"--nproc-per-node={RANKS}",
            f"--max-restarts={death.restarts}",
            "--faults",
            death.plan,
            str(SCRIPT),
        ],
        environment(out, death),
        out,
    )


def fixed(variables: str) -> dict[str, str]:
    """The variables of a rank that are the same in all runs."""
    found: dict[str, str] = json.loads(variables)
    for name in DRAWN:
        found[name] = "drawn" if name in found else "missing"
    path = Path(found.get("TORCHELASTIC_ERROR_FILE", ""))
    return {**found, "TORCHELASTIC_ERROR_FILE": "/".join(path.parts[-3:])}


@pytest.mark.parametrize(
    "death",
    [*QUICK, *(pytest.param(death, marks=pytest.mark.slow) for death in SLOW)],
    ids=str,
)
def test_a_death_under_torchrun(death: Death, tmp_path: Path) -> None:
    real, simulated = of_real(death, tmp_path / "real"), of_gpusim(death, tmp_path / "simulated")
    about = f"real:\n{real['text'][-2000:]}\nsimulated:\n{simulated['text'][-2000:]}"
    assert simulated["code"] == real["code"], about
    assert (simulated["root"] is None) == (real["root"] is None), about
    if simulated["root"] is not None:
        assert simulated["root"] == (str(death.rank), simulated["codes"][str(death.rank)]), about
        # torchrun orders failures by whole seconds: a survivor that ended in the same second, and
        # has a lower rank, may be its root cause.
        assert real["root"] == simulated["root"] or real["root"][1] in death.survivors, about
    for rank in {*real["codes"], *simulated["codes"]}:
        codes = {each["codes"].get(rank, "0") for each in (real, simulated)}
        assert len(codes) == 1 or codes <= death.survivors, (rank, codes)
    # A survivor that the agent ends while it waits, or while it writes, has fewer files.
    ended = [f"{rank}.{attempt}" for rank in range(RANKS) for attempt in range(death.restarts + 1)]
    own = {
        name for name in {*real["files"], *simulated["files"]} if not name.endswith(tuple(ended))
    }
    for each in (real, simulated):
        assert own <= set(each["files"])
    assert set(simulated["seen"]) == set(real["seen"])
    for name, told in real["seen"].items():
        heard = simulated["seen"][name]
        assert fixed(heard["environment"]) == fixed(told["environment"])
        for label, text in told.items():
            if label == "error":
                assert class_of(heard[label]) == class_of(text)
            elif label != "environment":
                assert heard[label] == text
        # The agent may end a real rank before it has said all.
        assert list(told) == list(heard)[: len(told)]
