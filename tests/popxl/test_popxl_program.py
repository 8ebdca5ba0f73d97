"""A whole popxl program: four ways of training on digits, one result, that of NumPy by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.oracles.environment import environment_outside_launchers
from tests.oracles.machine_time import PATIENCE
from tests.popxl import popxl_digits
from tests.popxl.popxl_digits import WAYS, Way, digest, train

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", WAYS)
def test_training_arrives_where_numpy_does(way: Way) -> None:
    expect_what_numpy_has(train(way))


@pytest.mark.parametrize("replicas", [1, 2])
def test_fewer_replicas_with_larger_batches_arrive_there_too(replicas: int) -> None:
    expect_what_numpy_has(train("all reduce", replicas))


def expect_what_numpy_has(weights: popxl_digits.Arrays) -> None:
    start = popxl_digits.first_weights()
    for name, value in popxl_digits.by_hand().items():
        assert np.abs(value - start[name]).max() > 0.02
        np.testing.assert_allclose(weights[name], value, rtol=1e-3, atol=5e-6)


def test_all_ways_arrive_at_the_same_bits() -> None:
    assert len({digest(train(way)) for way in WAYS}) == 1


def test_replicas_one_by_one_arrive_at_the_same_bits() -> None:
    assert digest(train("all reduce", one_by_one=True)) == digest(train("all reduce"))


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_under_poprun_all_instances_arrive_at_the_same_bits(instances: int, tmp_path: Path) -> None:
    images, labels = popxl_digits.data()
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    environ = environment_outside_launchers()
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = ["--num-instances", str(instances), "--num-replicas", "4"]
    program = ROOT / "tests" / "popxl" / "popxl_digits.py"
    script = [sys.executable, str(program), str(tmp_path / "digits.npz")]
    done = subprocess.run(
        [sys.executable, "-m", "gpusim.tools.launch", *arguments, *script],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition(": ")[2].split() for line in done.stdout.splitlines()]
    said = {int(number): set(digests) for number, *digests in lines}
    assert said == {number: {digest(train("all reduce"))} for number in range(instances)}
