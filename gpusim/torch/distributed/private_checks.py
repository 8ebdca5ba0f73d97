"""The private names of torch that the check of programs uses."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "COMPILER",
    "TorchDispatchMode",
    "is_transforming",
    "runs_backward",
    "unreduced_parameters",
]

COMPILER = "torch._inductor.compile_fx"
"""The module that is imported as soon as a program compiles functions to kernels."""

core: Any = torch._C


def runs_backward() -> bool:
    """Whether the calling thread runs a node of a backward pass, or a hook of one."""
    return bool(core._current_graph_task_id() != -1)


def is_transforming() -> bool:
    """Whether a transform of torch.func, or a tracer, calls functions on tensors without values."""
    modes = core._TorchDispatchModeKey
    return (
        core._functorch.peek_interpreter_stack() is not None
        or core._get_dispatch_mode(modes.PROXY) is not None
        or core._get_dispatch_mode(modes.FAKE) is not None
    )


def unreduced_parameters(module: Module) -> list[tuple[str, Any]]:
    """Parameters of FSDP2 whose gradients wait to be reduced: `set_requires_gradient_sync(False)`.

    **Returns**: for each its name and the sharded parameter, which an optimizer has.
    """
    found = []
    for each in module.modules():
        state_of: Any = getattr(each, "_get_fsdp_state", None)
        if state_of is None:
            continue
        state = state_of()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # of earlier versions, which have one or none
            groups = [each for each in [getattr(state, "_fsdp_param_group", None)] if each]
        for group in groups:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if parameter.unsharded_accumulated_grad is not None or (
                    whole is not None and whole.grad is not None
                ):
                    found.append((parameter._param_fqn or "", parameter.sharded_param))
    return found
