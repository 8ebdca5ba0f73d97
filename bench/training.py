"""Training a model on simulated replicas, beside a loop over them in plain PyTorch.

A step is forward and backward of all replicas, the mean of their gradients, and an update.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from bench.results import Training
from bench.timing import Timing, interleave, timed

REPLICAS = (2, 8, 64, 256)
QUICK_REPLICAS = (2, 64)
BATCH = 4  # samples of a replica
LAYERS = (64, 32, 10)
RATE = 0.1
CLOSE = 1e-5  # of weights after one step
OURS, MODEL, LOOP, WHOLE = "gpusim", "trainingModel", "loop", "one batch"
IPUS = 64  # that one trainingModel may have; more need distributed execution, as in PopTorch


def trainings(budget: float, replicas: Sequence[int] = REPLICAS) -> Iterator[Training]:
    """The result for each number of replicas; `budget` seconds for each."""
    if find_spec("torch") is None:
        yield Training(0, BATCH, problem="PyTorch is not installed")
        return
    for count in replicas:
        with ipus(IPUS):
            found = _measure(count, budget)
        yield found


@contextmanager
def ipus(count: int) -> Iterator[None]:
    """A block with this number of simulated IPUs; the default is smaller."""
    before = os.environ.get("GPUSIM_IPUS")
    os.environ["GPUSIM_IPUS"] = str(count)
    try:
        yield
    finally:
        del os.environ["GPUSIM_IPUS"]
        if before is not None:
            os.environ["GPUSIM_IPUS"] = before


class Steps(Protocol):
    """Somebody's way to train the same model."""

    def step(self, x: Any, y: Any) -> None: ...

    def weights(self) -> list[Any]: ...

    def end(self) -> None: ...


class Lockstep:
    """gpusim's: the traced model runs for all replicas at once."""

    def __init__(self, replicas: int) -> None:
        import gpusim.torch as gt

        self._model = _model()
        self._weights = {name: p.detach() for name, p in self._model.named_parameters()}
        self._replicas = replicas
        self._mean = gt.vmap(lambda tree: gt.pmean(tree, "i"), axis_name="i", out_dims=None)
        self._program: Any = None
        self._steps = 0

    def step(self, x: Any, y: Any) -> None:
        from gpusim.poptorch.replicas import compile_model

        apart = [value.unflatten(0, (self._replicas, BATCH)) for value in (x, y)]
        if self._program is None:
            one = [value[0] for value in apart]
            self._program = compile_model(
                self._model, one, training=True, replicas=self._replicas, execution="lockstep"
            )
        given = {
            name: value.expand(self._replicas, *value.shape)
            for name, value in self._weights.items()
        }
        found = self._program.run(given, {}, apart, counter=self._steps, seed=0)
        self._steps += 1
        for name, gradient in self._mean(found.gradients).items():
            self._weights[name].sub_(gradient, alpha=RATE)

    def weights(self) -> list[Any]:
        return [value.clone() for value in self._weights.values()]

    def end(self) -> None:
        pass


class Executed:
    """gpusim's: the same behind PopTorch's interface."""

    def __init__(self, replicas: int) -> None:
        from gpusim import poptorch

        self._model = _model()
        optimizer = poptorch.optim.SGD(self._model.parameters(), lr=RATE)
        options = poptorch.Options().replicationFactor(replicas).autoRoundNumIPUs()
        self._training = poptorch.trainingModel(self._model, options, optimizer)

    def step(self, x: Any, y: Any) -> None:
        self._training(x, y)

    def weights(self) -> list[Any]:
        return [value.clone() for value in self._model.state_dict().values()]

    def end(self) -> None:
        self._training.destroy()


class Looped:
    """PyTorch's: one replica after the other, whose gradients PyTorch adds up."""

    def __init__(self, replicas: int) -> None:
        import torch

        self._model = _model()
        self._replicas = replicas
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)

    def step(self, x: Any, y: Any) -> None:
        self._optimizer.zero_grad()
        pairs = zip(x.chunk(self._replicas), y.chunk(self._replicas), strict=True)
        for own_x, own_y in pairs:
            _, loss = self._model(own_x, own_y)
            (loss / self._replicas).backward()
        self._optimizer.step()

    def weights(self) -> list[Any]:
        return [value.clone() for value in self._model.state_dict().values()]

    def end(self) -> None:
        pass


def _model() -> Any:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = torch.nn.Linear(LAYERS[0], LAYERS[1])
            self.out = torch.nn.Linear(LAYERS[1], LAYERS[2])

        def forward(self, x: Any, y: Any) -> Any:
            scores = self.out(torch.relu(self.hidden(x)))
            return scores, torch.nn.functional.cross_entropy(scores, y)

    torch.manual_seed(0)
    return Model()


class _Runner:
    elsewhere = False

    def __init__(self, steps: Steps, x: Any, y: Any) -> None:
        self._call = partial(steps.step, x, y)

    def run(self, repeats: int) -> list[float]:
        return timed(self._call, repeats)


def _measure(replicas: int, budget: float) -> Training:
    """One number of replicas; all train the same model on the same samples."""
    import torch

    generator = torch.Generator().manual_seed(replicas)
    x = torch.randn(replicas * BATCH, LAYERS[0], generator=generator)
    y = torch.randint(LAYERS[-1], (replicas * BATCH,), generator=generator)
    ours = Lockstep(replicas)
    everyone: dict[str, Steps] = {OURS: ours, LOOP: Looped(replicas), WHOLE: Looped(1)}
    if replicas <= IPUS:
        everyone[MODEL] = Executed(replicas)
    try:
        for steps in everyone.values():
            steps.step(x, y)
        for name, steps in everyone.items():
            pairs = zip(ours.weights(), steps.weights(), strict=True)
            if not all(torch.allclose(a, b, CLOSE, CLOSE) for a, b in pairs):
                return Training(replicas, BATCH, problem=f"{name}: other weights after a step")
        found = interleave({n: _Runner(s, x, y) for n, s in everyone.items()}, budget)
    finally:
        for steps in everyone.values():
            steps.end()

    def timing(name: str) -> Timing | None:
        measured = found.get(name)
        return measured if isinstance(measured, Timing) else None

    return Training(replicas, BATCH, timing(OURS), timing(MODEL), timing(LOOP), timing(WHOLE))
