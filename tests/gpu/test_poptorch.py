"""PopTorch models that were moved to a GPU train there, to the weights that the host trains to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpusim
from gpusim import poptorch

pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.scores = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(torch.tanh(self.hidden(x)))
        return scores, nn.functional.cross_entropy(scores, y)


class Linear(nn.Module):
    """A loss with a gradient that is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(100, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return poptorch.identity_loss(self.w * x, reduction="sum")


def trained(device: str, execution: str) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    net = Net().to(device)
    options = poptorch.Options().replicationFactor(4).deviceIterations(2)
    options.Training.gradientAccumulation(2)
    options._Popart.set("gpusim.execution", execution)
    adam = poptorch.optim.Adam(net.parameters(), lr=0.01)
    train = poptorch.trainingModel(net, options, adam)
    for _ in range(3):
        scores, _ = train(X, Y)
    train.destroy()
    assert scores.device.type == "cpu"  # as the inputs
    assert {parameter.device.type for parameter in net.parameters()} == {device}
    return scores, [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.parametrize("execution", ["lockstep", "threads"])
def test_training_on_a_gpu_is_training_on_the_host(execution: str) -> None:
    torch.testing.assert_close(
        trained("cuda", execution), trained("cpu", execution), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "how", [{}, {"order": "ring"}, {"rounding": "stochastic", "seed": 3}], ids=str
)
def test_reduced_gradients_have_the_bits_of_the_host(how: dict[str, Any]) -> None:
    x = (torch.randn(8, 100, generator=torch.Generator().manual_seed(1)) * 10).half()

    def weights(device: str) -> Tensor:
        model = Linear().to(device)
        options = poptorch.Options().replicationFactor(8)
        options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        train = poptorch.trainingModel(model, options, sgd)
        with gpusim.reduction(**how):
            train(x)
        train.destroy()
        return model.w.detach().cpu()

    assert torch.equal(weights("cuda"), weights("cpu"))
