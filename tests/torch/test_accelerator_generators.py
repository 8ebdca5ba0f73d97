"""The generators of simulated GPUs: which functions draw from them, and who keeps their states."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.own.seeds import seeds_of

cuda: Any = torch.cuda
F: Any = functional

#: Functions that draw, of a device or of a tensor there.
DRAWS: dict[str, Callable[[Any], Any]] = {
    "rand": lambda device: torch.rand(5, device=device),
    "randint": lambda device: torch.randint(0, 99, (5,), device=device),
    "randperm": lambda device: torch.randperm(9, device=device),
    "randn_like": lambda device: torch.randn_like(torch.ones(5, device=device)),
    "normal": lambda device: torch.normal(torch.ones(5, device=device), 2.0),
    "bernoulli": lambda device: torch.bernoulli(torch.full((9,), 0.5, device=device)),
    "multinomial": lambda device: torch.multinomial(torch.ones(9, device=device), 5),
    "poisson": lambda device: torch.poisson(torch.full((5,), 4.0, device=device)),
    "normal_": lambda device: torch.empty(5).to(device).normal_(),
    "uniform_": lambda device: torch.empty(5, device=device)[1:4].uniform_(),
    "exponential_": lambda device: torch.empty(5, device=device).view(5, 1).exponential_(),
    "init": lambda device: nn.init.trunc_normal_(torch.empty(5, 2, device=device)),
    "module": lambda device: nn.Linear(3, 2, device=device).weight.detach(),
    "dropout": lambda device: F.dropout(torch.ones(30, device=device) * 2, 0.5),
    "dropout of a result": lambda device: nn.Dropout(0.3)(
        nn.Embedding(3, 8).to(device)(torch.tensor([0, 2]).to(device)) * 0 + 1
    ),
    "rrelu": lambda device: F.rrelu(-torch.ones(9, device=device), training=True),
    "lstm": lambda device: (
        torch.nn.LSTM(2, 2, 2, dropout=0.5, device=device)(torch.ones(3, 2, device=device))[0]
    ).detach(),
    "attention": lambda device: F.scaled_dot_product_attention(
        *(torch.ones(1, 4, 4, device=device) for _ in range(3)), dropout_p=0.5
    ),
    "operation": lambda device: torch.ops.aten.uniform(torch.ones(5, device=device)),
    "distribution": lambda device: torch.distributions.Normal(
        torch.zeros(5, device=device), torch.ones(5, device=device)
    ).sample(),
    "gradient": lambda device: gradient(device).normal_(),
    "default device": lambda device: of_default_device(device),
    "backward": lambda device: drawn_backward(device),
}


def gradient(device: Any) -> Tensor:
    leaf = torch.ones(5, device=device, requires_grad=True)
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def of_default_device(device: Any) -> Tensor:
    torch.set_default_device(device)
    try:
        return torch.rand(5)
    finally:
        torch.set_default_device(None)


def drawn_backward(device: Any) -> Any:
    leaf = torch.ones(5, device=device, requires_grad=True)
    y = leaf * 2
    y.register_hook(lambda grad: torch.rand_like(grad))
    y.sum().backward()
    return leaf.grad


def run(body: Callable[[int], Any], ranks: int = 1, processes: bool = False) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return launch(body, ranks, device="cpu", processes=processes)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_on_a_gpu_leave_the_cpu_alone(name: str) -> None:
    """The values are those of a CPU generator with the GPU's seed."""
    draw = DRAWS[name]

    def body(rank: int) -> None:
        torch.manual_seed(3)  # of both
        modules = name in ("dropout of a result",)  # which draw on the CPU first
        before = torch.get_rng_state()
        if not modules:
            cuda.manual_seed(5)
        on_gpu = draw("cuda:0")
        assert on_gpu.is_cuda
        if not modules:
            assert torch.equal(before, torch.get_rng_state())
            torch.manual_seed(5)
            cuda.manual_seed(1)
            state = cuda.get_rng_state()
            on_cpu = draw("cpu")
            assert not on_cpu.is_cuda
            assert torch.equal(state, cuda.get_rng_state())
            assert torch.equal(on_gpu.cpu(), on_cpu)
        else:
            after = torch.get_rng_state()
            nn.Dropout(0.3)(torch.ones(4))
            assert not torch.equal(after, torch.get_rng_state())
            torch.manual_seed(3)
            nn.Embedding(3, 8)
            assert torch.equal(after, torch.get_rng_state())

    run(body)


def test_ranks_start_with_generators_of_their_own() -> None:
    def body(rank: int) -> list[Tensor]:
        dist.init_process_group("nccl")
        assert cuda.initial_seed() == seeds_of(0, rank).of_gpu(0)
        first = torch.rand(3, device="cuda")
        dist.barrier()  # the turn goes to others
        second = torch.rand(3, device="cuda")
        if rank == 1:
            cuda.manual_seed_all(rank)
        dist.barrier()
        return [first.cpu(), second.cpu(), torch.rand(3, device="cuda").cpu()]

    for processes in (False, True):
        for rank, found in enumerate(run(body, 3, processes)):
            generator = torch.Generator().manual_seed(seeds_of(0, rank).of_gpu(0))
            expected = list(torch.rand(9, generator=generator).split(3))
            if rank == 1:
                expected[2] = torch.rand(3, generator=torch.Generator().manual_seed(rank))
            assert all(map(torch.equal, found, expected))


def test_devices_have_generators_of_their_own() -> None:
    def body(rank: int) -> None:
        cuda.set_device(1)
        cuda.manual_seed(8)
        other = cuda.get_rng_state(0)
        on_one = torch.rand(3, device="cuda")
        assert torch.equal(cuda.get_rng_state(0), other)
        cuda.default_generators[0].manual_seed(8)
        assert torch.equal(on_one, torch.rand(3, device="cuda:0"))
        with pytest.raises(IndexError):
            cuda.default_generators[2]

    run(body, 2)


def test_fork_rng() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(1)
        states = torch.get_rng_state(), cuda.get_rng_state()
        with torch.random.fork_rng(devices=[0]):
            torch.rand(2)
            torch.rand(2, device="cuda")
            assert not torch.equal(states[1], cuda.get_rng_state())
        assert torch.equal(states[0], torch.get_rng_state())
        assert torch.equal(states[1], cuda.get_rng_state())

    run(body)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_again_what_it_drew(reentrant: bool) -> None:
    def body(rank: int) -> None:
        for preserve in (True, False):
            torch.manual_seed(1)
            x = torch.ones(40, device="cuda", requires_grad=True)
            masks: list[Tensor] = []

            def block(x: Tensor, masks: list[Tensor] = masks) -> Tensor:
                made = torch.rand(40, device="cuda")  # a device argument in the backward pass
                masks.append(made)
                return F.dropout(x * 1, 0.5) * made

            y: Any = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=preserve)
            torch.rand(2, device="cuda")
            y.sum().backward()
            assert x.grad is not None and len(masks) == 2
            assert torch.equal(masks[0], masks[1]) == preserve
            assert torch.equal(x.grad, y.detach()) == preserve

    run(body)


class StatesTracker:
    """Named states of the GPU's generator, as Megatron-Core's CudaRNGStatesTracker keeps them."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        before = cuda.get_rng_state()
        cuda.manual_seed(seed)
        self.states[name] = cuda.get_rng_state()
        self.set(before)

    def set(self, state: Tensor) -> None:
        def callback() -> None:
            cuda.default_generators[cuda.current_device()].set_state(state)

        cuda._lazy_call(callback)

    def draw(self, name: str, function: Callable[[], Tensor]) -> Tensor:
        before = cuda.get_rng_state()
        self.set(self.states[name])
        result = function()
        self.states[name] = cuda.get_rng_state()
        self.set(before)
        return result


def test_a_tracker_of_named_states() -> None:
    def body(rank: int) -> list[Tensor]:
        cuda.set_device(int(os.environ["LOCAL_RANK"]))
        tracker = StatesTracker()
        tracker.add("tensor parallel", 100 + rank)
        cuda.manual_seed(7)
        weight = torch.empty(4, device="cuda")
        own = [tracker.draw("tensor parallel", lambda: weight.normal_().clone()) for _ in "ab"]
        common = torch.rand(4, device="cuda")
        return [each.cpu() for each in (*own, common)]

    zero, one = run(body, 2)
    for rank, found in enumerate((zero, one)):
        generator = torch.Generator().manual_seed(100 + rank)
        assert torch.equal(found[0], torch.empty(4).normal_(generator=generator))
        assert torch.equal(found[1], torch.empty(4).normal_(generator=generator))
    assert torch.equal(zero[2], one[2])


def test_a_generator_that_is_given_is_used() -> None:
    def body(rank: int) -> None:
        state = cuda.get_rng_state()
        made = torch.Generator("cuda").manual_seed(4)
        drawn = torch.rand(3, device="cuda", generator=made)
        again = torch.empty(3, device="cuda").uniform_(generator=made.manual_seed(4))
        assert torch.equal(drawn, again) and torch.equal(state, cuda.get_rng_state())

    run(body)
