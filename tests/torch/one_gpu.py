"""A machine with one GPU, for tests where there is none: the CPU plays it.

Above is the real layer of `device="cuda"`, which maps the numbers of GPUs. Below is the CPU as one
GPU, which refuses every number but 0 and knows nothing of the layer above.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.overrides import TorchFunctionMode

from gpusim.torch.distributed import launching, private
from gpusim.torch.distributed.accelerator import (
    OneGpu,
    cpu_as_accelerator,
    devices,
    one_gpu_as_many,
    simulated_gpus,
)
from gpusim.torch.distributed.own.seeds import seeds_of
from gpusim.torch.distributed.runners.threads import Launch

__all__ = ["machine_with_one_gpu"]


@contextmanager
def _both(*blocks: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


@contextmanager
def _gpus() -> Iterator[None]:
    with cpu_as_accelerator(), one_gpu_as_many():  # the second finds the names of the first
        yield


@contextmanager
def machine_with_one_gpu() -> Iterator[None]:
    """A block in which launches and commands find one GPU, that the CPU plays."""

    def gpus_of(launch: Any, rank: Any) -> AbstractContextManager[None]:
        below = simulated_gpus(1, seeds_of(launch.seed, rank.index).of_gpu)
        return _both(below, OneGpu(int(rank.environment[b"LOCAL_WORLD_SIZE"])))

    def run_backward(above: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        modes = private.function_modes()
        with ExitStack() as stack:
            for mode in (devices.current_mode(), above):  # in this order, as around the rank
                if mode not in modes:
                    TorchFunctionMode.__enter__(mode)
                    stack.callback(TorchFunctionMode.__exit__, mode, None, None, None)
            return engine(*args, **kwargs)

    with (
        mock.patch.object(Launch, "gpus", lambda launch: _gpus()),
        mock.patch.object(Launch, "gpus_of", gpus_of),
        mock.patch.object(OneGpu, "run_backward", run_backward),
        mock.patch.object(launching, "has_gpu", lambda: True),
        mock.patch.object(private, "has_gpu", lambda: True),
    ):
        yield
