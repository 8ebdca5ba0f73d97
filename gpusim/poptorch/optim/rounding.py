"""Where computed values become stored ones: one rounding, to nearest or stochastic.

The random bits are those of gpusim's contract, with counters that no reduction of the seed uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives.kernels import kernels
from ...torch.tensors import as_array, as_tensor, dtype_of, on_stream_of

__all__ = ["FIRST_STEP", "Rounder"]

#: `step` of a weight's rounding; that of accumulator k is k more. Reductions count from 1.
FIRST_STEP = 2**32

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rounder:
    """Writes float32 values to tensors of any floating-point type.

    - `stochastic`: whether float16 and bfloat16 are rounded stochastically.
    - `seed`: of the random bits. Element i of a value, in each group of replicas, has the lane of
      (seed, step, call, place): which value it is, the number of the update, and the parameter's.
    """

    stochastic: bool
    seed: int

    def write(self, target: Tensor, values: Tensor, step: int, call: int, place: int) -> None:
        """Round `values` into `target`, in place; the leading axis is that of the groups."""
        if not self.stochastic or target.dtype not in NARROW:
            target.copy_(values)
            return
        with on_stream_of([values]):
            array = as_array(values.contiguous())
            rounded = kernels(array).round_to(
                array,
                dtype_of(target),
                rounding="stochastic",
                seed=self.seed,
                step=step,
                call=call,
                place=place,
                batch_ndim=1,
            )
            target.copy_(as_tensor(rounded))
