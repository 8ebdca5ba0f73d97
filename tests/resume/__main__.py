"""Runs `gpusim resume` on every program, and compares what it says with what is expected.

python -m tests.resume [--only TEXT] [--kind bugs|correct|libraries] [--json FILE] [--real]
    [--pair SAVE,LOAD] [--skip N]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.resume.case import Case
from tests.resume.cases import BUGS, CORRECT, LIBRARIES

__all__ = ["PROGRAMS", "judge", "said"]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


def said(case: Case, fork: bool = False) -> dict[str, Any]:
    """The JSON of `gpusim resume` for a case, with its exit code, output and seconds."""
    script, *arguments = shlex.split(case.program)
    ranks = [",".join(map(str, numbers)) for numbers in (case.save, case.load)]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        command = [sys.executable, "-m", "gpusim", "resume", "-q", "--json", str(file)]
        command += ["--preload", "torch.distributed.checkpoint"]  # imported once for all ranks
        command += ["--save-ranks", ranks[0], "--load-ranks", ranks[1], *case.more]
        command += [str(PROGRAMS / script), *arguments, "--checkpoint", "{checkpoint}"]
        begin = time.monotonic()
        code, output = (forked if fork else started)(command, Path(scratch))
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {**found, "code": code, "seconds": time.monotonic() - begin, "output": output}


def started(command: list[str], scratch: Path) -> tuple[int, str]:
    """The exit code and the output of a command in a process of its own."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, env=environment())
    return done.returncode, done.stdout + done.stderr


def forked(command: list[str], scratch: Path) -> tuple[int, str]:
    """The same in a fork of this process, which imports torch once for all cases."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    from gpusim.tools.cli import main as command_line

    output = scratch / "output.txt"
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code, output.read_text()
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment())
        os.chdir(scratch)
        sys.argv = ["gpusim", *command[3:]]
        code = int(command_line() or 0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **own}


def judge(case: Case, found: dict[str, Any]) -> str:
    """ "right" if each pair is as expected, "elsewhere" if the state that differs is another.

    Else "missed", "ALARM", or "failed".
    """
    if found["code"] not in (0, 1) or "pairs" not in found:
        return "failed"
    verdicts = set()
    for pair in found["pairs"]:
        expected = case.expected(pair["save"], pair["load"])
        if expected != pair["verdict"]:
            verdicts.add({"different": "missed", "same": "ALARM"}.get(expected, "failed"))
        elif expected == "different" and pair["first"]["state"] not in case.at:
            verdicts.add("elsewhere")
    order = ("ALARM", "missed", "failed", "elsewhere")
    return next((verdict for verdict in order if verdict in verdicts), "right")


def row_of(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: the case, the verdict, and the first difference of each pair."""
    row = {"program": case.program, "bug": bool(case.says), "source": case.source}
    row |= {"says": case.says, "verdict": judge(case, found), "at": list(case.at)}
    row |= {"seconds": round(found["seconds"], 1), "pairs": []}
    for pair in found.get("pairs", []):
        first = pair["first"] or {}
        own = {name: pair[name] for name in ("save", "load", "verdict")}
        own |= {name: first.get(name) for name in ("state", "name", "step", "rank", "line", "text")}
        row["pairs"].append(own)
    return row


def printed(row: dict[str, Any]) -> str:
    """A row as lines of text."""
    lines = [f"{row['verdict']:9} {row['seconds']:5.1f} s  {row['program']}"]
    for pair in row["pairs"]:
        if pair["verdict"] == "same" and row["bug"] is False:
            continue
        lines.append(
            f"    {pair['save']} -> {pair['load']}: {pair['verdict']} {pair['state'] or ''}"
            f" {pair['name'] or ''} step {pair['step']} rank {pair['rank']}: {pair['text'] or ''}"
        )
    if row["verdict"] == "elsewhere":
        lines.append(f"    expected {row['at']}")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """The counts, in a sentence."""
    bugs = [row for row in rows if row["bug"]]
    right = sum(row["verdict"] == "right" for row in bugs)
    found = right + sum(row["verdict"] == "elsewhere" for row in bugs)
    correct = [row for row in rows if not row["bug"]]
    wrong = sum(row["verdict"] != "right" for row in correct)
    public = [row for row in bugs if row["source"] != "common"]
    seen = sum(row["verdict"] in ("right", "elsewhere") for row in public)
    return (
        f"{found} of {len(bugs)} bugs are found, {right} at the expected state; of {len(public)} "
        f"published ones {seen}; {wrong} of {len(correct)} correct programs raise an alarm or fail."
    )


def checked_for_real(case: Case) -> dict[str, Any]:
    """The case over gloo, as real.py sees it, in the form of `said`."""
    from tests.resume.real import compare

    begin = time.monotonic()
    found: dict[str, Any] = {"code": 0, "output": "", "pairs": []}
    for save in case.save:
        for load in case.load:
            verdict, text = compare(case.program, save, load, case.stop)
            first = {"state": case.at[0] if case.at else "", "text": text[-300:]}
            found["pairs"].append({"save": save, "load": load, "verdict": verdict, "first": first})
    return {**found, "seconds": time.monotonic() - begin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose program contains this")
    parser.add_argument("--kind", choices=("bugs", "correct", "libraries"))
    parser.add_argument("--pair", help="this pair of each case alone, such as 2,4")
    parser.add_argument("--skip", type=int, default=0, help="leave the first cases out")
    parser.add_argument("--json", type=Path, help="write the rows into this file")
    parser.add_argument("--real", action="store_true", help="over gloo, without gpusim")
    options = parser.parse_args()
    kinds = {"bugs": BUGS, "correct": CORRECT, "libraries": LIBRARIES, None: (*BUGS, *CORRECT)}
    cases = kinds[options.kind]
    cases = tuple(case for case in cases if options.only in case.program)
    if options.pair:
        save, load = map(int, options.pair.split(","))
        cases = tuple(replace(case, save=(save,), load=(load,)) for case in cases)
        cases = tuple(case for case in cases if not case.says or (save, load) in case.wrong)
    rows = []
    for case in cases[options.skip :]:
        found = checked_for_real(case) if options.real else said(case, fork=True)
        rows.append(row_of(case, found))
        print(printed(rows[-1]), flush=True)
        if rows[-1]["verdict"] == "failed":
            print(found["output"][-2000:], flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(summary(rows))
    return int(any(row["verdict"] not in ("right", "elsewhere") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
