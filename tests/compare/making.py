"""Runs of programs: on simulated ranks, or in real processes of gloo; in forks of this process.

The process that calls this has imported torch once for all runs, and started no thread.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.compare.pair import Made

__all__ = ["command", "import_once", "record"]

ROOT = Path(__file__).parents[2]
TRIES = 3


def import_once() -> None:
    """Import what the programs and the commands import, for all forks."""
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.distributed.optim
    import torch.distributed.tensor.parallel
    import torch.nn.parallel
    import torch.optim.lr_scheduler
    import torch.utils.data.distributed  # noqa: F401

    import gpusim.recording.torch_hook
    import gpusim.tools.cli
    import gpusim.tools.compare.command
    import gpusim.tools.torchrun  # noqa: F401


def record(program: str, name: str, made: Made, folder: Path) -> Path:
    """Run a program, and return its record.

    **Raises**: RuntimeError, with what it printed, if it fails.
    """
    folder.mkdir(parents=True)
    (folder / name).write_text(program)
    if made.real:
        return _recorded_for_real(name, made, folder)
    words = ["torchrun", "--nproc-per-node", str(made.ranks), "--reduction", made.reduction]
    words += ["--record", "record", "--arrays", "all", "-q", name]
    code, output = command(words, folder)
    if code:
        raise RuntimeError(f"{name}, {made}: code {code}\n{output}")
    return folder / "record"


def command(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run `gpusim` with these words in a fork; its exit code and output."""

    def run() -> int:
        from gpusim.tools.cli import main

        sys.argv = ["gpusim", *words]
        return int(main() or 0)

    pid = _forked(run, folder, folder / "output.txt", {})
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, (folder / "output.txt").read_text(errors="replace")


def _recorded_for_real(name: str, made: Made, folder: Path) -> Path:
    """A record by real processes; again if PyTorch's groups abort before it is whole."""
    for number in range(TRIES):
        record = folder / f"record-{number}"
        codes = _processes(name, made, folder, record.name)
        if _whole(record, made.ranks):  # a process may abort later, as the groups end
            return record
    outputs = "\n".join((folder / f"{rank}.txt").read_text() for rank in range(made.ranks))
    raise RuntimeError(f"{name}, {made}: codes {codes}\n{outputs}")


def _whole(record: Path, ranks: int) -> bool:
    """Whether each rank has ended its record without an error."""
    files = [record / f"calls-{rank}.jsonl" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        return False
    last = [json.loads(file.read_text().splitlines()[-1]) for file in files]
    return all(line["kind"] == "end" and "error" not in line for line in last)


def _processes(name: str, made: Made, folder: Path, record: str) -> list[int]:
    """The exit codes of the ranks; all end when one has failed."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(made.ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(made.ranks)}

    def run() -> int:
        sys.argv = ["torch_hook", record, name]
        runpy.run_module("gpusim.recording.torch_hook", run_name="__main__", alter_sys=True)
        return 0

    children = {}
    for rank in range(made.ranks):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        children[_forked(run, folder, folder / f"{rank}.txt", own)] = rank
    codes: dict[int, int] = {}
    while len(codes) < made.ranks:
        pid, status = os.wait()  # this process has no other children
        if pid not in children:
            continue
        codes[children[pid]] = os.waitstatus_to_exitcode(status)
        if codes[children[pid]]:  # the others may wait for it for ever
            for other, rank in children.items():
                if rank not in codes and not _whole(folder / record, made.ranks):
                    os.kill(other, signal.SIGKILL)
    return [codes[rank] for rank in range(made.ranks)]


def _forked(run: Callable[[], int], folder: Path, output: Path, own: dict[str, str]) -> int:
    """The id of a fork that runs a function in a folder, and ends with the code it returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(own, PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        os.environ.update(CUDA_VISIBLE_DEVICES="")
        os.chdir(folder)
        code = run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
