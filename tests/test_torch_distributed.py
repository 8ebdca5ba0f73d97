"""torch.distributed's own collectives, between real processes over gloo, as the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import gpusim.torch as gt

RANK = Path(__file__).with_name("torch_rank.py")
SIZE = 3


def test_replicas_get_what_ranks_of_gloo_get(tmp_path: Path) -> None:
    x = torch.randn(SIZE, 6, 5)
    torch.save(x, tmp_path / "x.pt")
    alone = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, str(rank), str(SIZE), tmp_path],
            stderr=subprocess.PIPE,
            text=True,
            env=alone,
        )
        for rank in range(SIZE)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=120)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()

    def program(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "psum": gt.psum(x, "i"),
            "all_gather": gt.all_gather(x, "i"),
            "all_to_all": gt.all_to_all(x, "i", 0, 0, tiled=True),
        }

    for found in (gt.vmap(program, axis_name="i")(x), gt.pmap(program, "i")(x)):
        for rank in range(SIZE):
            expected = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
            torch.testing.assert_close({k: v[rank] for k, v in found.items()}, expected)
