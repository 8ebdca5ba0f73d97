"""Models shown as PyTorch shows them, and with the blocks that begin in them."""

from __future__ import annotations

from torch import nn

from .annotations import _BlockHook

__all__ = ["module_repr"]


def module_repr(m: nn.Module) -> str:
    """`repr(m)`, with what `BeginBlock` was given before each module with which a block begins.

    >>> import torch
    >>> from gpusim.poptorch.blocks import BeginBlock
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    >>> _ = BeginBlock(model[1], "second", ipu_id=1)
    >>> print(module_repr(model))
    Sequential(
      (0): ReLU()
      (1): BeginBlock(user_id=second, ipu_id=1): Tanh()
    )
    """
    begins = "".join(
        f"{hook!r}: " for hook in m._forward_pre_hooks.values() if isinstance(hook, _BlockHook)
    )
    if not any(
        isinstance(hook, _BlockHook)
        for each in m.modules()
        if each is not m
        for hook in each._forward_pre_hooks.values()
    ):
        return begins + repr(m)  # containers shorten their lists of equal modules
    extra = m.extra_repr()
    lines = extra.split("\n") if extra else []
    for name, child in m._modules.items():
        shown = repr(child) if child is None else module_repr(child)
        lines.append(f"({name}): " + shown.replace("\n", "\n  "))
    inner = "".join(f"\n  {line}" for line in lines)
    return f"{begins}{m._get_name()}({inner}\n)"
