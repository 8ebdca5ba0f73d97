"""Names for what is computed in a block of code."""

from __future__ import annotations

from typing import Any

from ..replicas.forward import forward_mode

__all__ = ["NameScope"]


class NameScope:
    """A context manager: names of tensors that are computed inside begin with its own.

    **Arguments**

    - `name`: a string; AssertionError for anything else.

    The names are those of `executor.getTensorNames()`, "encoder/mul:0" for example. Outside of a
    model it does nothing.

    >>> import torch
    >>> with NameScope("encoder"):
    ...     y = torch.ones(1) * 2
    >>> y
    tensor([2.])
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), "Parameter to NameScope must be a string"
        self.name = name

    def __enter__(self) -> None:
        now = forward_mode()
        if now is not None:
            now.enter_scope(self.name)

    def __exit__(self, *_: Any) -> None:
        now = forward_mode()
        if now is not None:
            now.leave_scope()
