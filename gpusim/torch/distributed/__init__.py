"""torch.distributed on simulated ranks: DDP, FSDP and other programs as they are, in one process."""

from __future__ import annotations

from torch import distributed as _dist

from .folds import FoldCall
from .ranks import current_rank as _current_rank
from .ranks import launch

__all__ = ["FoldCall", "launch"]


def _group(options: object, backend_options: object) -> object:
    """What torch calls for each group of the backend 'gpusim'."""
    given: _dist.distributed_c10d._DistributedBackendOptions = options
    return _current_rank().new_group(given.group_id, given.global_ranks_in_group, backend_options)


_dist.Backend.register_backend("gpusim", _group, extended_api=True, devices=["cpu", "cuda"])
