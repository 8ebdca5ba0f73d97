"""The CPU, or one real GPU, in the role of the GPUs that a script asks for.

In a launch with `device="cpu"` each rank has as many devices "cuda" as its node has ranks, and all
of them are the host:

- `devices`: `CpuAsCuda`, a function mode of the rank's thread, reads device arguments. A tensor
  that is moved to "cuda", or from it, is copied as it would be. `marks` says which tensors live
  there, `generators` which numbers they draw.
- `names`: what each name of torch.cuda and torch.accelerator does, with the classes of `standins`.
- `install`: `cpu_as_accelerator` puts all of it in place. Scripts and their libraries get the
  answers of a machine with GPUs, and so do the modules of torch that move tensors between devices.
  Its other modules are told that there is none, so that they run as they do on the CPU.
- `batch_norm` and `attention` have kernels for the CPU that torch has for GPUs only.

Whatever is neither answered nor without effect on the CPU is refused by name. It all holds in the
threads of ranks only, and ends with the launch.

In a launch with `device="cuda"` all of a node's GPUs are the machine's first: `one_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable

from .devices import CpuAsCuda
from .generators import DRAWS
from .install import CASTS, asks_for_gpu, cpu_as_accelerator
from .one_gpu import OneGpu, one_gpu_as_many, out_of_memory
from .standins import Stream

__all__ = [
    "CASTS",
    "DRAWS",
    "OneGpu",
    "asks_for_gpu",
    "cpu_as_accelerator",
    "one_gpu_as_many",
    "out_of_memory",
    "simulated_gpus",
]


def simulated_gpus(count: int, seed_of: Callable[[int], int]) -> CpuAsCuda:
    """The GPUs of a rank, as a context of its thread.

    **Arguments**: `count`, the number of devices; `seed_of`, the seed that the generator of each
    starts with.
    """
    return CpuAsCuda(count, seed_of, Stream)
