"""A machine with one GPU, for tests where there is none: the CPU plays it.

Above is the real layer of `device="cuda"`, which maps the numbers of GPUs. Below is the CPU as one
GPU, which refuses every number but 0 and knows nothing of the layer above.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from gpusim.torch.distributed import launching, private
from gpusim.torch.distributed.accelerator import (
    OneGpu,
    cpu_as_accelerator,
    devices,
    one_gpu,
    one_gpu_as_many,
    simulated_gpus,
)
from gpusim.torch.distributed.accelerator.replacing import rewriting
from gpusim.torch.distributed.own.seeds import seeds_of
from gpusim.torch.distributed.runners.threads import Launch

__all__ = ["machine_with_one_gpu"]

DDP = inspect.signature(DistributedDataParallel.__init__)


@contextmanager
def _both(*blocks: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


@contextmanager
def _gpus() -> Iterator[None]:
    """Both layers; the upper one finds the names of the lower one.

    In between DDP gets GPU 0, all that there is below. It is told numbers, and a GPU would not
    mind them.
    """
    with cpu_as_accelerator():
        init = rewriting(
            DistributedDataParallel.__init__, DDP, {"device_ids": _first}, one_gpu.current
        )
        with mock.patch.object(DistributedDataParallel, "__init__", init), one_gpu_as_many():
            yield


def _first(mode: OneGpu, devices: Any) -> Any:
    return None if devices is None else [mode.real(device) for device in devices]


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
