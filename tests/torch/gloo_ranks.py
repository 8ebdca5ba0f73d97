"""Real processes of torch.distributed's gloo: `python -m tests.torch.gloo_ranks FOLDER`.

FOLDER/cases.json lists cases: a program, its number of ranks, and its arguments. The ranks of each
are forked from this process, which has imported torch, and write their tensors to FOLDER.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.torch.distributed_programs import PROGRAMS

ROOT = Path(__file__).parents[2]
Case = tuple[str, int, dict[str, Any]]


def gloo(cases: list[Case], folder: Path) -> list[list[dict[str, torch.Tensor]]]:
    """What the ranks of each case return in real processes."""
    (folder / "cases.json").write_text(json.dumps(cases))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.gloo_ranks", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
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


def main(folder: Path) -> int:
    """Fork the ranks of each case; how many have failed."""
    cases: list[Case] = [tuple(case) for case in json.loads((folder / "cases.json").read_text())]
    for name in (
        "_dynamo",
        "distributed.checkpoint.state_dict",
        "distributed.fsdp",
        "distributed.optim",
        "distributed.pipelining",
        "distributed.tensor.parallel",
    ):
        importlib.import_module(f"torch.{name}")  # once, before the ranks are forked
    failed = 0
    for number, case in enumerate(cases):
        children = []
        for rank in range(case[1]):
            child = os.fork()
            if not child:
                try:
                    run_rank(number, rank, case, folder)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        bad = sum(os.waitpid(child, 0)[1] != 0 for child in children)
        if bad:
            print(f"case {number}, {case}: {bad} ranks failed", file=sys.stderr)
        failed += bad
    return min(failed, 99)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
