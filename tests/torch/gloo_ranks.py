"""Real processes of torch.distributed's gloo, forked by a process that has imported torch.

`python -m tests.torch.gloo_ranks` reads folders, one a line, and answers each with the number of
ranks that have failed. FOLDER/cases.json lists cases: a program, its number of ranks, and its
arguments. The ranks write their tensors, and what they print, to FOLDER.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.torch.distributed_programs import PROGRAMS

ROOT = Path(__file__).parents[2]
LONGEST = 350  # seconds that the cases of a folder may take
Case = tuple[str, int, dict[str, Any]]
Found = list[dict[str, torch.Tensor]]  # by each rank, named


@functools.cache
def started() -> subprocess.Popen[str]:
    """A process that forks ranks; it ends with its input."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.torch.gloo_ranks"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def server() -> subprocess.Popen[str]:
    """The process that forks ranks, for all tests of this process."""
    if (
        started().poll() is not None
    ):  # what ends the processes of a test that hangs has ended it too
        started.cache_clear()
    return started()


def gloo(cases: list[Case], folder: Path) -> list[Found]:
    """What the ranks of each case return in real processes."""
    (folder / "cases.json").write_text(json.dumps(cases))
    forking = server()
    assert forking.stdin is not None and forking.stdout is not None
    print(folder, file=forking.stdin, flush=True)
    answer = forking.stdout.readline()
    if not answer:  # it has ended, by its alarm
        started.cache_clear()
        os.killpg(forking.pid, signal.SIGKILL)  # the ranks too
    assert answer == "0\n", (answer, (folder / "printed").read_text()[-4000:])
    return [
        [torch.load(folder / f"{number}-{rank}.pt") for rank in range(ranks)]
        for number, (_, ranks, _) in enumerate(cases)
    ]


def run_rank(number: int, rank: int, case: Case, folder: Path) -> None:
    """One rank of one case, in its own process."""
    name, ranks, arguments = case
    own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in own.items()})
    torch.set_num_threads(1)
    import torch.distributed as dist

    genuine = dist.init_process_group

    def init(backend: str) -> None:
        path = f"file://{folder}/meet-{number}"
        genuine(backend, init_method=path, rank=rank, world_size=ranks)

    dist.init_process_group = init
    found = PROGRAMS[name](**arguments)
    torch.save(found, folder / f"{number}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_cases(folder: Path) -> int:
    """Fork the ranks of each case; how many have failed."""
    cases: list[Case] = [tuple(case) for case in json.loads((folder / "cases.json").read_text())]
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    failed = 0
    for number, case in enumerate(cases):
        children = []
        for rank in range(case[1]):
            child = os.fork()
            if not child:
                os.dup2(printed, 1)
                os.dup2(printed, 2)
                try:
                    run_rank(number, rank, case, folder)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        bad = sum(os.waitpid(child, 0)[1] != 0 for child in children)
        if bad:
            os.write(printed, f"case {number}, {case}: {bad} ranks failed\n".encode())
        failed += bad
    os.close(printed)
    return failed


def main() -> None:
    for name in (
        "_dynamo",
        "distributed.checkpoint.state_dict",
        "distributed.fsdp",
        "distributed.optim",
        "distributed.pipelining",
        "distributed.tensor.parallel",
    ):
        importlib.import_module(f"torch.{name}")  # once, before the ranks are forked
    for line in sys.stdin:
        signal.alarm(LONGEST)
        print(run_cases(Path(line.rstrip("\n"))), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
