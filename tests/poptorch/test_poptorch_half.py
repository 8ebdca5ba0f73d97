"""Float16 and float32 in one operator: the activations choose, and float32 weights are masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import Options

HALF, FLOAT = torch.float16, torch.float32


pytestmark = pytest.mark.usefixtures("ended")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (6, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (6, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (6, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (6, 2, 5, 5)),
    "conv transposed": (lambda: nn.ConvTranspose2d(2, 3, 3), (6, 2, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "instance norm": (
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        (6, 2, 5),
    ),
    "layer norm": (lambda: nn.LayerNorm(4), (6, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (6, 4, 3)),
    "attention": (lambda: Attention(), (6, 2, 4)),
    "matmul": (lambda: Product(), (6, 4)),
}


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Loss(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        return out, poptorch.identity_loss(out * out, "mean")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("of_input", [HALF, FLOAT], ids=["half input", "float input"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_input_chooses_the_dtype(name: str, of_input: torch.dtype, replicas: int) -> None:
    make, shape = LAYERS[name]
    layer = make()
    if of_input is FLOAT:
        layer.half()
    x = torch.randn(shape).half().to(of_input)
    options = Options().replicationFactor(replicas).broadcastBuffers(replicas == 1)
    reference = make().float()
    reference.load_state_dict({n: v.float() for n, v in layer.state_dict().items()})
    sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
    before = {n: v.clone() for n, v in layer.state_dict().items()}
    train = poptorch.trainingModel(Loss(layer), options.outputMode(poptorch.OutputMode.All), sgd)
    out, loss = train(torch.cat([x] * replicas))
    assert out.dtype is of_input and loss.dtype is of_input
    expected = reference(x.float())
    (expected * expected).mean().backward()
    for own in out.chunk(replicas):
        torch.testing.assert_close(own.float(), expected, rtol=1e-2, atol=1e-2)
    for key, parameter in layer.named_parameters():
        assert parameter.dtype is before[key].dtype
        step = parameter.detach().float() - before[key].float()
        gradient = dict(reference.named_parameters())[key].grad
        assert gradient is not None
        torch.testing.assert_close(step, -0.5 * gradient, rtol=2e-2, atol=1e-2)
    for key, buffer in layer.named_buffers():
        assert buffer.dtype is before[key].dtype
        wanted = dict(reference.named_buffers())[key]
        torch.testing.assert_close(buffer.float(), wanted.float(), rtol=1e-2, atol=1e-2)


def test_elementwise_operators_promote_as_in_pytorch() -> None:
    infer = poptorch.inferenceModel(lambda x, y: (x + y, x * 2, y - x))
    found = infer(torch.ones(2, dtype=HALF), torch.ones(2))
    assert [x.dtype for x in found] == [FLOAT, HALF, FLOAT]


@pytest.mark.parametrize("cast", [Tensor.half, Tensor.float])
def test_bytes_are_cast_inside_of_forward(cast: Callable[[Tensor], Tensor]) -> None:
    layer = nn.Linear(3, 2)
    infer = poptorch.inferenceModel(lambda x: layer(cast(x)))
    x = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    found = infer(x)
    assert found.dtype is cast(x).dtype
    torch.testing.assert_close(found.float(), layer(x.float()).detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layers", [1, 5])
def test_weights_of_float32_learn_from_inputs_of_float16(layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor) -> Any:
            out = self.model(x)
            return out, nn.functional.mse_loss(out, y)

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    train = poptorch.trainingModel(WithLoss(), None, sgd)
    x, y = torch.rand(2, 4).half(), torch.rand(2, 4).half()
    for _ in range(2500):
        _, loss = train(x, y)
    assert loss.item() < 0.001
    assert all(parameter.dtype is FLOAT for parameter in model.parameters())
