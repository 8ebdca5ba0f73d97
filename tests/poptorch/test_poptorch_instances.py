"""A script that imports PopTorch, PopDist and the addons by their own names, as `gpusim run` and
under poprun: two instances get the weights, bit by bit, that one process has with all replicas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpusim
from gpusim import poptorch
from tests.oracles.environment import environment_outside_launchers
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]

SCRIPT = """
import hashlib
import popdist
import popdist.poptorch
import poptorch
import poptorch_experimental_addons as pea
import torch

TOTAL = 4


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(6, 5)
        self.out = torch.nn.Linear(5, 3)
        self.own = torch.nn.Parameter(torch.zeros(2, 3))  # of two groups of replicas

    def forward(self, x, y):
        hidden = torch.tanh(self.hidden(x))
        together = pea.collectives.all_reduce_cross_replica_sum(hidden.mean(), TOTAL)
        scores = self.out(hidden) + self.own + 0.1 * torch.rand_like(hidden[:, :3])
        return torch.nn.functional.cross_entropy(scores, y) + 0.01 * together


popdist.init()
under_poprun = popdist.isPopdistEnvSet()
options = popdist.poptorch.Options() if under_poprun else poptorch.Options()
if not under_poprun:
    options.replicationFactor(TOTAL)
options.deviceIterations(2).randomSeed(7).outputMode(poptorch.OutputMode.All)
options.Training.gradientAccumulation(3)
net = Net()
adam = poptorch.optim.Adam(net.parameters(), lr=0.01, accum_type=torch.float16)
model = poptorch.trainingModel(net, options, adam)
model.own.replicaGrouping(
    poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup
)
generator = torch.Generator().manual_seed(1)
shape = 2, 2, 3, TOTAL, 2  # calls, iterations, accumulations, replicas, samples
images = torch.randn(*shape, 6, generator=generator)
labels = torch.randint(3, shape, generator=generator)
held = options.replication_factor
first = popdist.getReplicaIndexOffset()
for x, y in zip(images, labels):
    own = slice(first, first + held)
    losses = model(x[:, :, own].reshape(-1, 6), y[:, :, own].reshape(-1))
assert losses.shape == (2 * 3 * held,)
assert not torch.equal(net.own[0], net.own[1])
weights = b"".join(value.detach().numpy().tobytes() for value in net.parameters())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def weights_of(*command: str | Path) -> list[str]:
    """What the instances print."""
    environ = environment_outside_launchers()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"weights (\w{64})$", done.stdout, re.MULTILINE)


def test_two_instances_get_the_weights_of_one_process(script: Path) -> None:
    run = ("-m", "gpusim", "run", script)
    alone = weights_of(*run[1:])
    poprun = ("gpusim.tools.launch", "--num-instances", "2", "--num-replicas", "4", sys.executable)
    assert len(alone) == 1
    assert weights_of(*poprun, *run) == 2 * alone


def test_a_world_of_ones_own_will_do() -> None:
    options = poptorch.Options().replicationFactor(2)
    infer = poptorch.inferenceModel(torch.nn.Identity(), options)
    with gpusim.World([2]):
        assert infer(torch.arange(2)).tolist() == [0, 1]
    assert infer(torch.arange(2)).tolist() == [0, 1]  # it enters the world by itself
    with (
        gpusim.World([2]),
        pytest.raises(gpusim.GpusimError, match=r"compiled for 2 replicas, 2 of them here, and is"),
    ):
        infer(torch.arange(2))
    infer.destroy()


def test_a_world_of_other_replicas_will_not() -> None:
    infer = poptorch.inferenceModel(torch.nn.Identity(), poptorch.Options().replicationFactor(2))
    with (
        gpusim.World([4]),
        pytest.raises(ValueError, match="replication_factor=2: expected 4, as this instance holds"),
    ):
        infer(torch.arange(2))
