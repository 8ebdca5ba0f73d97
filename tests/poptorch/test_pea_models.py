"""poptorch_experimental_addons in models that PopTorch runs: outputs, gradients and updated weights
are those of a simulation in one process, written out by hand."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpusim.poptorch_experimental_addons as pea
from gpusim import poptorch
from gpusim.poptorch.enums import CommGroupType, VariableRetrievalMode
from tests.oracles.machine_time import PATIENCE
from tests.poptorch.pea_simulated import SIMULATED

ROOT = Path(__file__).parents[2]
REPLICAS = (2, 4, 8)


class Model(nn.Module):
    """A function of its parameters and inputs; the loss is the sum of its squares."""

    def __init__(self, f: Callable[..., Tensor], *, decides: bool, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))
        self.f = f
        self.decides = decides

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out = self.f(*self.parameters(), *inputs)
        if self.decides and out.sum() > 1e9:  # on values: such a model cannot be traced
            out = out + 1
        return out, poptorch.identity_loss(out.square(), reduction="sum")


def options(replicas: int) -> poptorch.Options:
    made = poptorch.Options().replicationFactor(replicas).outputMode(poptorch.OutputMode.All)
    made._Popart.setPatterns({"OpToIdentity": True, "AutogradProxyOpPattern": True})
    made.randomSeed(3)
    return made


def trained(
    model: Model, replicas: int, *inputs: Tensor, shards: tuple[str, ...] = ("X",)
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, unreduced gradients and weights after a step of SGD with rate 1."""
    chosen = options(replicas)
    for name, _ in model.named_parameters():
        chosen.anchorTensor(name, f"Gradient___{name}")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    step = poptorch.trainingModel(model, chosen, optimizer)
    for name in shards:
        getattr(step, name).replicaGrouping(
            CommGroupType.Orthogonal, 1, VariableRetrievalMode.OnePerGroup
        )
    out, _ = step(*inputs)
    names = [name for name, _ in model.named_parameters()]
    gradients = {name: step.getAnchoredTensor(name) for name in names}
    weights = {name: getattr(step, name).detach().clone() for name in names}
    step.destroy()
    return out, gradients, weights


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decides", [False, True], ids=["lockstep", "threads"])
@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_collectives_in_training(replicas: int, name: str, decides: bool) -> None:
    """Weights of each replica's own; gradients are divided by the number of replicas."""
    case, X = SIMULATED[name], random(replicas, 2 * replicas, 3)
    model = Model(lambda X: case.operation(X, replicas), decides=decides, X=X)
    out, gradients, weights = trained(model, replicas)
    y = case.forward(X)
    gradient = case.backward(2 * y)
    close(out, y.flatten(0, 1))
    close(gradients["X"], gradient.flatten(0, 1))
    close(weights["X"], X - gradient / replicas)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_collectives_in_inference(replicas: int) -> None:
    x = random(replicas * 2 * replicas, 3)
    each = x.reshape(replicas, 2 * replicas, 3)
    for case in SIMULATED.values():
        model = poptorch.inferenceModel(
            Model(lambda x, of=case: of.operation(x, replicas), decides=False), options(replicas)
        )
        out, _ = model(x)
        close(out, case.forward(each).flatten(0, 1))
        model.destroy()


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_network_sharded_over_replicas_trains_as_a_whole_one(replicas: int) -> None:
    """The first layer in columns, the second in rows, a shared bias; the same input everywhere."""
    first, second, bias = random(4, 16), random(16, 3, seed=1), random(3, seed=2)
    x = random(6, 4, seed=3)

    def network(bias: Tensor, first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        hidden = pea.sharded.repcolcol_sharded_matmul(x, first, replicas).tanh()
        return pea.sharded.colrowrep_sharded_matmul(hidden, second, replicas) + bias

    model = Model(
        network,
        decides=False,
        bias=bias,
        first=torch.stack(first.chunk(replicas, 1)),
        second=torch.stack(second.chunk(replicas, 0)),
    )
    repeated = x.repeat(replicas, 1)
    out, _, weights = trained(model, replicas, repeated, shards=("first", "second"))

    whole = [w.clone().requires_grad_() for w in (first, second, bias)]
    y = (x @ whole[0]).tanh() @ whole[1] + whole[2]
    of_first, of_second, of_bias = torch.autograd.grad(y.square().sum(), whole)
    close(out, y.detach().repeat(replicas, 1))
    close(weights["bias"], bias - of_bias)  # the mean of what all replicas have
    close(torch.cat([*weights["first"]], 1), first - of_first / replicas)
    close(torch.cat([*weights["second"]]), second - of_second / replicas)


def test_gradients_of_choice_in_a_model() -> None:
    X = 10 * random(2, 5)
    model = Model(lambda X: pea.autograd_proxy(X.round(), 3 * X), decides=False, X=X)
    out, gradients, _ = trained(model, 2)
    close(out, X.round().flatten())
    close(gradients["X"], (6 * X.round()).flatten())


def test_random_bits_are_of_seed_micro_batch_and_replica_whatever_the_execution() -> None:
    """Two steps of two replicas, whose weights do not change."""

    def outputs(decides: bool) -> Tensor:
        model = Model(
            lambda X: pea.quantise_fpx_ste(X, 2, 1), decides=decides, X=torch.full((300,), 1.25)
        )
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
        step = poptorch.trainingModel(model, options(2), optimizer)
        found = torch.cat([step()[0] for _ in range(2)]).reshape(4, 300)
        step.destroy()
        return found

    lockstep = outputs(False)
    assert torch.equal(outputs(False), lockstep) and torch.equal(outputs(True), lockstep)
    for place, own in enumerate(lockstep):
        for other in lockstep[:place]:
            assert 90 < (own == other).sum() < 210


def test_formats_in_a_model_are_those_of_an_ipu() -> None:
    model = Model(lambda X: pea.quantise_fpx(X, 6, 2), decides=False, X=torch.ones(2))
    with pytest.raises(ValueError, match=r"exponent_bits=6.*maximum number of exponent bits is 5"):
        trained(model, 1, shards=())


def test_another_replication_factor_than_the_models_is_refused() -> None:
    total = pea.collectives.all_reduce_cross_replica_sum
    model = Model(lambda X: total(X, 4), decides=False, X=torch.ones(3))
    with pytest.raises(ValueError, match="factor is 4, but the number of replicas is 2"):
        trained(model, 2, shards=())


def test_sparse_layers_infer() -> None:
    weight = pea.sparse.magnitude_prune(random(6, 10), block_size=2, density=0.5)
    x = random(4, 10, seed=1)
    model = poptorch.inferenceModel(pea.sparse.StaticSparseLinear(weight), options(2))
    close(model(x), x @ pea.sparse.block_coo_to_dense(weight).T)
    model.destroy()


PROGRAM = """
import json, sys
from pathlib import Path
import popdist, popdist.poptorch, poptorch, torch
import poptorch_experimental_addons as pea
import poptorch_experimental_addons.sharded
from poptorch_experimental_addons import collectives, sparse
from poptorch_experimental_addons._impl.core import quantise_fpx_ste
from poptorch_experimental_addons._impl.collectives import all_gather_cross_replica
import gpusim.poptorch_experimental_addons as own

assert pea is own and pea.sharded is own.sharded and collectives is own.collectives
assert quantise_fpx_ste is pea.quantise_fpx_ste
assert all_gather_cross_replica is collectives.all_gather_cross_replica
assert sparse.StaticSparseLinear is own._impl.sparse.StaticSparseLinear

instance = popdist.getInstanceIndex() if popdist.isPopdistEnvSet() else 0
options = popdist.poptorch.Options() if popdist.isPopdistEnvSet() else poptorch.Options()
if not popdist.isPopdistEnvSet():
    options.replicationFactor(4)
options.randomSeed(1).outputMode(poptorch.OutputMode.All)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.X = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3) / 8)

    def forward(self, x):
        y = collectives.all_gather_cross_replica(self.X * x, 4).sum(0)
        y = y + collectives.all_to_all_single_cross_replica(self.X * x, 4)
        y = collectives.all_reduce_cross_replica_sum(quantise_fpx_ste(y, 5, 2), 4)
        return y, poptorch.identity_loss(y.square(), reduction="sum")


model = Model()
step = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=1e-5))
own = options.replication_factor
inputs = torch.arange(12.0).reshape(4, 3)[instance * own :][:own]
outputs = torch.cat([step(inputs)[0] for _ in range(2)])
Path(sys.argv[1], f"{instance}.json").write_text(
    json.dumps({"outputs": outputs[-4:].tolist(), "weights": model.X.tolist()})
)
step.destroy()
"""


def test_a_script_computes_the_same_in_two_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the package's own name: in this process, and under poprun and `gpusim run`."""
    script, one, two = tmp_path / "program.py", tmp_path / "one", tmp_path / "two"
    script.write_text(PROGRAM)
    one.mkdir()
    two.mkdir()
    importlib.import_module("gpusim.aliases")
    monkeypatch.setattr(sys, "argv", [str(script), str(one)])
    runpy.run_path(str(script))
    poprun = ["-m", "gpusim.tools.launch", "--num-instances", "2", "--num-replicas", "4"]
    done = subprocess.run(
        [sys.executable, *poprun, sys.executable, "-m", "gpusim", "run", str(script), str(two)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (expected,) = (json.loads(path.read_text()) for path in one.iterdir())
    found = [json.loads(path.read_text()) for path in sorted(two.iterdir())]
    assert found == [expected, expected]
