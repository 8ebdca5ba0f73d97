"""NCCL with two ranks, on one GPU where there are not two: in a process of its own, with a limit.

From NCCL 2.30 on one process may have two ranks on a GPU, if NCCL_MULTI_RANK_GPU_ENABLE is set
before its first use; before, one process for each rank with another NCCL_HOSTID.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.cupy_arrays import AS_MODULE, GPUS

ROOT = Path(__file__).parents[2]
SCRIPT = "tests.gpu.nccl_ranks"
LIMIT = 120  # seconds: ranks that do not find each other wait for ever
IDENTITY = re.compile(r"\b[0-9a-f]{256}\b")
FEW = {"NCCL_MAX_CTAS": "2", "NCCL_P2P_DISABLE": "0"}  # both ranks' kernels must fit on the GPU

nccl = importlib.import_module("cupy.cuda.nccl")
if not nccl.available:
    pytest.skip("needs NCCL: pip install nvidia-nccl-cu13", allow_module_level=True)

SHARED = GPUS < 2
IN_ONE_PROCESS = not SHARED or nccl.get_version() >= 23000


def start(*arguments: str, **settings: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **FEW, **settings}
    return subprocess.Popen(
        [sys.executable, *AS_MODULE, SCRIPT, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes: subprocess.Popen[str]) -> None:
    try:
        for process in processes:
            said, _ = process.communicate(timeout=LIMIT)
            assert process.returncode == 0 and "bits as expected" in said, said
    finally:
        for process in processes:
            process.kill()


def identity_of(process: subprocess.Popen[str]) -> str:
    """The 256 hexadecimal digits that it prints, maybe after warnings of libraries."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if found := IDENTITY.search(line):
            return found[0]
        said.append(line)
    raise AssertionError(f"no identity of NCCL: {''.join(said)}")


def test_two_ranks_exchange_and_sum() -> None:
    if IN_ONE_PROCESS:
        ended(start("threads", NCCL_MULTI_RANK_GPU_ENABLE="1"))
        return
    first = start("rank", "0", NCCL_HOSTID="first")
    ended(first, start("rank", "1", identity_of(first), NCCL_HOSTID="second"))


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_pmap_over_two_gpus_sends_by_nccl() -> None:
    ended(start("pmap"))
