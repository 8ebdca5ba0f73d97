"""torch.distributed on simulated ranks: programs with DDP or FSDP as they are.

`launch` runs a function on N ranks, `gpusim torchrun` a script. A rank is a thread of this process
with a torch.distributed of its own, whose backend is gpusim: sums are added in the order and
precision that a `gpusim.Reduction` says, so that the bits are those of an engine that has a twin.

How it works:

- `launching` picks a runner. `runners`: ranks as threads on pmap's scheduler, one at a time, up to
  where it has to wait; as processes, whose calls a thread here makes; and spread over instances.
- `own`: what a process has once, and each rank has to itself: one table.
- `calls`: what torch asks for. Calls of one group meet by their number in the `exchange`. A rank
  posts its part and goes on; the last one does the work for all, in the memory of their tensors.
  Who differs is named at once. `group` is torch's ProcessGroup, `folds` says which Reduction a call
  has, `store` is the key-value store.
- `accelerator`: the CPU in the role of GPUs; `memory`: tensors as arrays.
- `private`, `private_calls`, `private_groups`: torch's private interface, as far as it is used.

Arrows go from `launching` to `runners`, `calls`, `own`, and to the files beside them.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as _dist

from ...recording import RecordedCall, Recorder, SummaryRow
from .calls.folds import FoldCall
from .launching import launch
from .own.threads import current_rank as _current_rank

__all__ = ["FoldCall", "RecordedCall", "Recorder", "SummaryRow", "launch"]


def _group(given: Any, options: Any) -> Any:
    """The function that torch calls for each group of the backend 'gpusim'."""
    return _current_rank().new_group(
        given.group_id, given.global_ranks_in_group, options, given.timeout
    )


_dist.Backend.register_backend("gpusim", _group, extended_api=True, devices=["cpu", "cuda"])
