"""torch.distributed on simulated ranks: programs with DDP or FSDP as they are.

`launch` runs a function on N ranks, `gpusim torchrun` a script. A rank is a thread of this process
with a torch.distributed of its own, whose backend is gpusim: sums are added in the order and
precision that a `gpusim.Reduction` says, so that the bits are those of an engine that has a twin.

How it works:

- `ranks`: a launch, on pmap's scheduler. One rank runs at a time, up to where it has to wait. With
  the turn the process's globals change hands: generators, default dtype, working directory,
  sys.argv, `__main__`. os.environ looks at the thread.
- `exchange`: calls of one group meet by their number. A rank posts its part and goes on; the last
  one does the work for all, in the memory of their tensors. Who differs is named at once.
- `group`: torch's ProcessGroup. Each method posts one call.
- `folds`: which Reduction a call has, and gpusim.collectives' folds by torch's names.
- `store`: the key-value store; `memory`: tensors as arrays; `casts`: autocast's cache for ranks.
- `streams`: the order of ranks' work on a GPU; `accelerator`: the CPU in the role of GPUs.
- `worlds`: ranks that a script starts by itself, and `client`: their side, in the script's process.
- `private`: what is used of torch's private interface.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as _dist

from ...recording import RecordedCall, Recorder, SummaryRow
from .folds import FoldCall
from .ranks import current_rank as _current_rank
from .ranks import launch

__all__ = ["FoldCall", "RecordedCall", "Recorder", "SummaryRow", "launch"]


def _group(given: Any, options: Any) -> Any:
    """The function that torch calls for each group of the backend 'gpusim'."""
    return _current_rank().new_group(
        given.group_id, given.global_ranks_in_group, options, given.timeout
    )


_dist.Backend.register_backend("gpusim", _group, extended_api=True, devices=["cpu", "cuda"])
