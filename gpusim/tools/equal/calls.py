"""The collectives that a rank calls, with file and line: what came last before a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

from gpusim.maps.call_site import call_site
from gpusim.torch.distributed.private import functional

__all__ = ["Calls"]

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
FUNCTIONAL = (
    "all_gather_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
)
LOGGED = ("all_reduce", "reduce")


class Calls:
    """Notes calls of torch.distributed's functions. Owner: the rank's main thread."""

    def __init__(
        self, order: Callable[[], int], logged: Callable[[str, Tensor], None] | None
    ) -> None:
        self._order, self._logged = order, logged
        self.calls: list[tuple[int, str, str, list[int]]] = []
        self.groups: set[tuple[int, ...]] = set()
        #: Peers to which messages went, and from which they came, in the order of the calls.
        self.messages: list[tuple[str, int]] = []
        self._inside = False

    def install(self, stack: ExitStack) -> None:
        """Put the wrappers in, until the stack ends."""
        for name in NAMES:
            if not hasattr(distributed_c10d, name):  # of another release of torch
                continue
            wrapped = self._wrap(name, getattr(distributed_c10d, name))
            for module in (dist, distributed_c10d):
                _replace(stack, module, name, wrapped)
        for name in FUNCTIONAL:
            wrapped = self._wrap(name, getattr(functional, name))
            _replace(stack, functional, name, wrapped)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if self._inside or torch.compiler.is_compiling():
                return function(*args, **named)
            self._inside = True
            try:
                site = call_site("gpusim.tools.equal")
                self._note(name, site, args, named)
                result = function(*args, **named)
            finally:
                self._inside = False
            if self._logged is not None and name in LOGGED and result is None and args:
                tensor = args[0]
                if isinstance(tensor, Tensor) and not tensor.requires_grad:
                    self._logged(f"{name} at {site}", tensor)
            return result

        return call

    def _note(self, name: str, site: str, args: Any, named: dict[str, Any]) -> None:
        group = named.get("group")
        ranks: list[int] = []
        try:
            if name == "batch_isend_irecv":
                operations = args[0] if args else named["p2p_op_list"]
                for each in operations:
                    kind = "send" if "send" in each.op.__name__ else "recv"
                    self.messages.append((kind, each.peer))
                group = operations[0].group
            elif name in ("send", "isend", "recv", "irecv"):
                kind = "send" if "send" in name else "recv"
                peer = named.get("dst" if kind == "send" else "src", (*args, None, None)[1])
                if peer is not None:
                    self.messages.append((kind, int(peer)))
            if isinstance(group, dist.ProcessGroup) or group is None:
                ranks = dist.get_process_group_ranks(group)
        except (AttributeError, IndexError, RuntimeError, ValueError):
            ranks = []  # the call itself will say what is wrong with it
        self.calls.append((self._order(), name, site, ranks))

    def known_groups(self) -> list[list[int]]:
        """The ranks of every group that there is."""
        known = {tuple(sorted(ranks)) for ranks in distributed_c10d._world.pg_group_ranks.values()}
        self.groups |= known
        return [list(group) for group in sorted(self.groups) if len(group) > 1]


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)
