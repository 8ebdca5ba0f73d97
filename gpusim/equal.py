"""Whether a parallel program computes what it computes on one rank; the command is `gpusim equal`.

`watch` names a tensor in a program, for the comparison. `check` compares two functions in a test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from gpusim.reduction import ReductionLike
    from gpusim.tools.equal.checking import Verdict

__all__ = ["check", "watch"]


def watch(name: str, tensor: Tensor) -> Tensor:
    """Let `gpusim equal` compare a tensor that no module returns. Elsewhere it does nothing.

    **Arguments**:

    - `name`: the tensor's name, the same in the reference and in the candidate. A name that comes
      more than once in a step is counted.
    - `tensor`: of any shape and dtype; a DTensor too. Its gradient is compared as well.

    **Returns**: the tensor.

    **Raises**: TypeError if the name is not a string.

    >>> import torch
    >>> from gpusim.equal import watch
    >>> watch("scores", torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    if not isinstance(name, str):
        raise TypeError(f"watch: name={name!r:.60}: expected a text")
    tracing = sys.modules.get("gpusim.tools.equal.tracing")
    tracer = tracing.current() if tracing is not None else None
    if tracer is not None:
        tracer.watch(name, tensor)
    return tensor


def check(
    reference: Callable[..., Any],
    candidate: Callable[..., Any] | None = None,
    ranks: int = 2,
    args: Sequence[Any] = (),
    *,
    reference_ranks: int = 1,
    steps: int = 0,
    dtype: str = "float64",
    reduction: ReductionLike | None = None,
    device: str | None = None,
) -> Verdict:
    """Run two functions on simulated ranks, and raise if they do not compute the same.

    **Arguments**:

    - `reference`: a function of the rank's number and of `args`, as `launch` of
      `gpusim.torch.distributed` takes it: it calls `init_process_group`, and trains.
    - `candidate`: the same; None is the reference itself, on more ranks.
    - `ranks`: those of the candidate.
    - `args`: more arguments of both.
    - `reference_ranks`: those of the reference.
    - `steps`: optimizer steps that are compared; 0 for all.
    - `dtype`: "float64": float32 becomes float64, and narrower floats too if the reference computes
      in them; "keep": the program's own, compared up to rounding.
    - `reduction`, `device`: of `launch`.

    **Returns**: what was compared, and how it is related.

    **Raises**:

    - AssertionError: if they differ, with the first tensor that does and the reason.
    - ValueError: for other values of `dtype`; if nothing can be compared.
    - GpusimError: of `launch`, if a rank fails.

    >>> import torch, torch.distributed as dist
    >>> from gpusim.equal import check
    >>> def train(rank):
    ...     dist.init_process_group("gloo")
    ...     torch.manual_seed(0)
    ...     model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    ...     x = torch.arange(12.0).reshape(4, 3).tensor_split(dist.get_world_size())[rank]
    ...     model(x).square().mean().backward()
    ...     torch.optim.SGD(model.parameters(), lr=0.1).step()
    >>> check(train, ranks=2).equal
    True
    """
    from gpusim.tools.equal.checking import check_functions

    return check_functions(
        reference,
        candidate or reference,
        ranks,
        args,
        reference_ranks=reference_ranks,
        steps=steps,
        dtype=dtype,
        reduction=reduction,
        device=device,
    )
