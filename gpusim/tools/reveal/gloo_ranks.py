"""Ranks over gloo for `reveal_order.py`: `python gloo_ranks.py RANKS ARGUMENT...` forks them.

It is run by its path, and needs PyTorch and the script beside it. torchrun would do the same, but
imports PyTorch once for each rank.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence


def main(ranks: int, words: Sequence[str]) -> int:
    """Fork the ranks; the exit code of rank 0, or of another one that fails."""
    importlib.import_module("torch.distributed")  # once, before the ranks are forked
    script = importlib.import_module("reveal_order")
    with tempfile.TemporaryDirectory(prefix="gpusim-reveal-") as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                code = 1
                try:
                    code = rank_main(script, rank, ranks, folder, words)
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children.append(child)
        return wait_for(children)


def rank_main(script: object, rank: int, ranks: int, folder: str, words: Sequence[str]) -> int:
    """One rank: the process group, and the script's `main`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    rendezvous = f"file://{folder}/rendezvous"
    try:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
        code: int = script.main(["--engine", "torch", "--backend", "gloo", *words])  # type: ignore[attr-defined]
    except SystemExit as end:  # argparse's
        code = end.code if isinstance(end.code, int) else 1
    return code


def wait_for(children: list[int]) -> int:
    """Wait for all ranks; end the others once one has failed."""
    codes: list[int] = []
    left = set(children)
    try:
        while left:
            child, status = os.wait()
            left.discard(child)
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1] not in (0, *codes[:-1]):
                _end(left)
    except KeyboardInterrupt:
        _end(left)
        for child in left:
            os.waitpid(child, 0)
        return 130
    return next((abs(code) for code in codes if code), 0)


def _end(children: set[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
