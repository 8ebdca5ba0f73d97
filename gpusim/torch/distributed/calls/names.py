"""NamedGroup: what torch keeps of a group, and what a group says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..private import ProcessGroup, without_dynamo
from .exchange import GroupKey

__all__ = ["NamedGroup"]


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{name} of process groups is not simulated")

    return refuse


@without_dynamo
class NamedGroup(ProcessGroup):
    """A group with its names, its backend's name and its store."""

    def __init__(self, place: int, key: GroupKey, backend: str) -> None:
        super().__init__(place, len(key.ranks))
        self._key, self._calls = key, 0
        self._name, self._description, self._backend = key.name, "", backend
        self._backend_name, self._store = backend_name(backend), None
        self.splits = 0  # how many times the rank has split the group

    def name(self) -> str:
        """The backend that the program asked for; of several NCCL's, else gloo's, as of torch's."""
        return self._backend_name

    _get_backend_name = name

    def getBackendName(self) -> str:
        """The name for C++, which takes "gloo" and "nccl" for objects of their own class."""
        return "gpusim"

    def get_group_store(self) -> Any:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives the rank has called on the group."""
        return self._calls

    def _has_hooks(self) -> bool:
        """Hooks on completion are NCCL's alone."""
        return False

    # Of torch 2.14. Those of the base class would not reach simulated calls.
    get_reconfigure_handle = _refusing("get_reconfigure_handle")
    new_window = _refusing("new_window")
    reconfigure = _refusing("reconfigure")
    register_abort_hook = _refusing("register_abort_hook")
    register_post_hook = _refusing("register_post_hook")
    register_pre_hook = _refusing("register_pre_hook")

    def made_by(self, store: Any) -> None:
        """Note what torch keeps of a group that it has made."""
        self._store = store

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description


def backend_name(named: str) -> str:
    """The name of a group's backend, by what the program names: "gloo", "cpu:gloo,cuda:nccl"."""
    names = [each.rpartition(":")[2] for each in named.lower().split(",")]
    if len(names) == 1 and names[0] not in ("", "undefined"):
        return names[0]
    return "nccl" if "nccl" in names else "gloo"
