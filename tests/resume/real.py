"""The programs on real processes over gloo: an oracle that knows nothing of `gpusim resume`.

python -m tests.resume.real PROGRAM --save 2 --load 2,4 [--torchrun] [-- ARGS]

For each pair it runs the program uninterrupted, to a checkpoint, and from there, and compares the
traces: samples by step, losses, and what else the program reports. Processes are forks of this one,
which has imported torch, or those of torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["compare", "run"]

PROGRAMS = Path(__file__).parent / "programs"
Trace = dict[int, list[dict[str, Any]]]  # by step, the ranks


def run(
    program: str, ranks: int, checkpoint: Path, stop: int = 0, torchrun: bool = False
) -> Trace | str:
    """The trace of a program, or the end of what it printed if it failed."""
    script, *arguments = shlex.split(program)
    arguments = [str(PROGRAMS / script), *arguments, "--checkpoint", str(checkpoint)]
    with tempfile.TemporaryDirectory() as folder:
        own = {"TRACE": folder, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        own |= {"STOP_AFTER": str(stop)} if stop else {}
        own |= {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(PROGRAMS)}
        launch = by_torchrun if torchrun else by_forks
        if failure := launch(arguments, ranks, own, Path(folder)):
            return failure
        files = [Path(folder, f"{rank}.jsonl") for rank in range(ranks)]
        lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return {row[0]["step"]: list(row) for row in zip(*lines, strict=True)}


def by_torchrun(arguments: list[str], ranks: int, own: dict[str, str], folder: Path) -> str:
    own = {name: value for name, value in own.items() if not name.startswith("MASTER")}
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone"]
    command += ["--nproc-per-node", str(ranks), *arguments]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    return done.stderr[-3000:] or "failed" if done.returncode else ""


def by_forks(arguments: list[str], ranks: int, own: dict[str, str], folder: Path) -> str:
    import torch.distributed.checkpoint  # the children share it
    import torch.distributed.fsdp  # noqa: F401

    children = []
    for rank in range(ranks):
        if pid := os.fork():
            children.append(pid)
        else:
            child(arguments, rank, own, folder)
    codes: dict[int, int] = {}
    while len(codes) < ranks:
        # Nothing else of this process has children, so that any child is one of these.
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # the others may wait for it for ever
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGKILL)
    if any(codes.values()):
        written = [Path(folder, f"{rank}.txt").read_text()[-1500:] for rank in range(ranks)]
        return f"codes {list(codes.values())}\n" + "\n".join(written)
    return ""


def child(arguments: list[str], rank: int, own: dict[str, str], folder: Path) -> None:
    """Run the program in this fork, and end."""
    import traceback
    import warnings

    file = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    try:
        warnings.simplefilter("ignore")
        os.environ.update({**own, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        os.environ["LOCAL_WORLD_SIZE"] = own["WORLD_SIZE"]
        sys.argv = arguments
        sys.path.insert(0, str(PROGRAMS))
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def compare(
    program: str, save: int, load: int, stop: int = 4, torchrun: bool = False
) -> tuple[str, str]:
    """ "same", "different", "refused" or "failed" (in the first runs), and a sentence.

    `stop` is the step whose checkpoint is loaded; the save run ends after the step that follows.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = run(program, save, Path(folder, "whole"), 0, torchrun)
        if isinstance(whole, str):
            return "failed", whole
        begun = run(program, save, Path(folder, "begun"), stop + 1, torchrun)
        if isinstance(begun, str):
            return "failed", begun
        resumed = run(program, load, Path(folder, "begun"), 0, torchrun)
        if isinstance(resumed, str):
            return "refused", resumed
    rows = [[whole[step] for step in sorted(whole) if step > stop]]
    rows += [[resumed[step] for step in sorted(resumed)]]
    if sorted(resumed) != [step for step in sorted(whole) if step > stop]:
        return "different", f"steps {sorted(resumed)}"
    for own, other in zip(*rows, strict=True):
        if text := difference(own, other, save == load < 3):
            return "different", f"step {own[0]['step']}: {text}"
    return "same", ""


def difference(own: list[dict[str, Any]], other: list[dict[str, Any]], exact: bool) -> str:
    """The difference in one step; unless `exact`, losses may differ by rounding.

    DDP's first step after a start has other buckets: more than two ranks add in another order.
    """
    samples = [Counter(i for line in lines for i in line["indices"]) for lines in (own, other)]
    if samples[0] != samples[1]:
        return f"samples {sorted(samples[0].elements())} {sorted(samples[1].elements())}"
    if exact:
        for rank, (first, second) in enumerate(zip(own, other, strict=True)):
            for key in first:
                if first[key] != second[key]:
                    return f"{key} of rank {rank}: {first[key]} {second[key]}"
        return ""
    losses = [sum(float.fromhex(x["loss"]) for x in lines) / len(lines) for lines in (own, other)]
    if abs(losses[0] - losses[1]) > 2e-5 * abs(losses[0]):
        return f"loss {losses[0]} {losses[1]}"
    for key in ("lr", "scale", "decay"):
        if own[0].get(key) != other[0].get(key):
            return f"{key}: {own[0].get(key)} {other[0].get(key)}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--save", default="2")
    parser.add_argument("--load", default="2")
    parser.add_argument("--stop", type=int, default=4)
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    for save in map(int, options.save.split(",")):
        for load in map(int, options.load.split(",")):
            verdict, text = compare(options.program, save, load, options.stop, options.torchrun)
            print(f"{save} -> {load}: {verdict} {text}", flush=True)


if __name__ == "__main__":
    main()
