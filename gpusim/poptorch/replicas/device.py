"""The device "ipu" in models: it is that on which they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ABOUT_IPU", "on_this_device"]

OF_TENSORS = vars(torch._C.TensorBase)

#: What an IPU's tensors say otherwise than those of the device that stands for it.
ABOUT_IPU: dict[Any, Callable[..., Any]] = {
    OF_TENSORS["is_ipu"].__get__: lambda tensor: True,
    OF_TENSORS["ipu"]: lambda tensor, *args, **kwargs: tensor,
}


def on_this_device(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of torch, with this device where they say "ipu".

    >>> here = torch.device("cpu")
    >>> on_this_device(torch.zeros, (2,), {"device": "ipu"}, here)
    ((2,), {'device': device(type='cpu')})
    """
    if is_ipu(kwargs.get("device")):
        kwargs = kwargs | {"device": device}
    if function is Tensor.to and len(args) > 1 and is_ipu(args[1]):
        args = (args[0], device, *args[2:])
    return args, kwargs


def is_ipu(device: Any) -> bool:
    """Whether this is the IPU, by its name or as a device."""
    if isinstance(device, torch.device):
        return device.type == "ipu"
    return isinstance(device, str) and device.partition(":")[0] == "ipu"
