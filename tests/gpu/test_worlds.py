"""Worlds whose arrays are on GPUs: NCCL between the instances, and the bits of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gpusim
from tests.gpu.cupy_arrays import AS_MODULE, cupy
from tests.worlds import everything
from tests.worlds.test_world import start


@pytest.mark.parametrize(("replicas", "instances"), [(8, 2), (7, 3)])
def test_instances_on_gpus_give_the_bits_of_one_process(
    replicas: int, instances: int, tmp_path: Path
) -> None:
    if not cupy.cuda.nccl.available:
        pytest.skip("needs NCCL")
    module = (*AS_MODULE, "tests.worlds.on_gpus")
    done = start(instances, *module, str(replicas), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [np.load(tmp_path / f"{instance}.npz") for instance in range(instances)]
    expected = everything.run(gpusim.World([replicas]))
    names = {name.replace("/", "|"): name for name in expected}
    assert len(parts[0].files) > 150
    differing = [
        name
        for name in parts[0].files
        if not np.array_equal(np.concatenate([p[name] for p in parts]), expected[names[name]])
    ]
    assert not differing, differing[:20]
