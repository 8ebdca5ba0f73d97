"""Custom argument parsers: they find the tensors in types of users and libraries.

Users register a parser for a type; a value is parsed by the parser of its nearest registered class.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.poptorch.replicas.structures import PARSERS

__all__ = [
    "ICustomArgParser",
    "parsed",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
]


class ICustomArgParser(ABC):
    """How the tensors in a user's type are found, and how a value with other tensors is made.

    Both go through the tensors in the same order. What else the value holds is a constant of the
    compiled model.

    >>> class Pair:
    ...     def __init__(self, left, right):
    ...         self.left, self.right = left, right
    >>> class PairParser(ICustomArgParser):
    ...     def yieldTensors(self, struct):
    ...         yield struct.left
    ...         yield struct.right
    ...
    ...     def reconstruct(self, original_structure, tensor_iterator):
    ...         return Pair(next(tensor_iterator), next(tensor_iterator))
    >>> registerCustomArgParser(Pair, PairParser())
    >>> parsed(Pair(torch.zeros(1), torch.ones(1)))
    True
    >>> registerCustomArgParser(Pair, None)
    """

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Any:
        """Yield every tensor in `struct`, always in the same order."""

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """A value like `original_structure` with the iterator's tensors in that order."""


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Let models take arguments, and return results, of a type.

    **Arguments**

    - `arg_data_type`: the type; values of classes derived from it are parsed too.
    - `arg_parser`: its parser; None takes away the one that it has.

    poptorch.Error for a parser of another type than ICustomArgParser.
    """
    if arg_parser is None:
        PARSERS.pop(arg_data_type, None)
        return
    if not isinstance(arg_parser, ICustomArgParser):
        raise createPoptorchError("arg_parser must inherit from ICustomArgParser")
    PARSERS[arg_data_type] = arg_parser


def parsed(value: object) -> bool:
    """Whether the value's class has a parser, or one that it is derived from."""
    return any(kind in PARSERS for kind in type(value).__mro__)


def registerGeometricCustomArgParsers() -> None:
    """Let models take PyTorch Geometric's Data, HeteroData and Batch.

    ModuleNotFoundError where PyTorch Geometric is not installed.
    """
    data = import_module("torch_geometric.data")
    for kind in (data.Data, data.HeteroData):  # what batches are derived from
        registerCustomArgParser(kind, GraphParser())


class GraphParser(ICustomArgParser):
    """Graphs of PyTorch Geometric: the tensors of all their stores, by store and key."""

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        for store, key in places(struct):
            yield store[key]

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        made = copy.copy(original_structure)  # with stores of its own
        for store, key in places(made):
            store[key] = next(tensor_iterator)
        return made


def places(graph: Any) -> list[tuple[Any, str]]:
    """Where a graph's tensors are: a store and a key each."""
    return [
        (store, key)
        for store in graph.stores
        for key in sorted(store.keys())
        if isinstance(store[key], torch.Tensor)
    ]
