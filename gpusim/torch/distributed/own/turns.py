"""The state that a process has once, and each rank that is a thread has to itself, in turns."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch

from ..private import PrintOptions
from .generators import GENERATORS, cuda_states, set_cuda_states
from .loggers import LoggerStates
from .seeds import Seeds, sow
from .table import Attribute, Value, rows

__all__ = ["Globals"]

ATTRIBUTES = [row.kept for row in rows() if isinstance(row.kept, Attribute)]
VALUES = [row.kept for row in rows() if isinstance(row.kept, Value)]

#: Types of values that are changed in their place, so that each rank needs a copy.
CHANGED = (dict, list, set, PrintOptions)


def _is_empty(attribute: Attribute) -> bool:
    value = attribute.read()
    return isinstance(value, (dict, list, set)) and not value


#: Attributes with containers that are empty as a rule, as those of hooks. While all are, ranks
#: share them; the rank that fills one keeps it, and the next rank gets a new one.
CONTAINERS = [each for each in ATTRIBUTES if _is_empty(each)]
KINDS: list[Callable[[], Any]] = [type(each.read()) for each in CONTAINERS]
OTHERS = [each for each in ATTRIBUTES if each not in CONTAINERS]
READS = [each.read for each in VALUES]


def _reader(attributes: Sequence[Attribute]) -> Callable[[], list[Any]]:
    """A function that reads all of them at once: a turn has no time to spare."""
    spaces, names = [vars(each.owner) for each in attributes], [each.name for each in attributes]
    return lambda: list(map(operator.getitem, spaces, names))


_read_containers, _read_others = _reader(CONTAINERS), _reader(OTHERS)


class Globals:
    """The state that a process has once and each rank has to itself, as it is at one time.

    The rows of the table that change hands with the turn. torch keeps its grad mode, autocast and
    default device for each thread.
    """

    def __init__(self) -> None:
        #: Of generators that are yet to be seeded, in the rank's first turn.
        self.seeds: Seeds | None = None
        self.cuda: list[torch.Tensor] = []
        self.save()
        self.containers: list[Any] | None = _read_containers()

    def of_rank(self, seeds: Seeds) -> Globals:
        """Those that a rank starts with: the same, with generators that are seeded."""
        result = object.__new__(Globals)
        vars(result).update(vars(self))
        result.seeds = seeds
        own = self.containers or ()
        result.containers = _copied(own) if any(own) else None
        result.attributes, result.values = _copied(self.attributes), _copied(self.values)
        return result

    def save(self) -> None:
        """Take what is there now."""
        self.states = [generator.read() for generator in GENERATORS]
        if torch.cuda.default_generators:
            self.cuda = cuda_states()
        containers = _read_containers()
        self.containers = containers if any(containers) else None
        self.attributes = _read_others()
        self.values = [read() for read in READS]
        self.loggers = LoggerStates()

    def restore(self, now: Globals) -> None:
        """Put this in place of `now`. Only what differs is written."""
        self.restore_generators(now)
        self.restore_settings(now)

    def restore_generators(self, now: Globals) -> None:
        """Put the states of generators in place of those of `now`."""
        if self.seeds is not None:
            sow(self.seeds)
            self.seeds = None
            return
        for generator, own, other in zip(GENERATORS, self.states, now.states, strict=True):
            if own != other:
                generator.write(own)
        set_cuda_states(self.cuda)

    def restore_settings(self, now: Globals) -> None:
        """Put all but the states of generators in place of that of `now`."""
        if self.containers is not None or now.containers is not None:
            containers = self.containers or [kind() for kind in KINDS]
            for attribute, own in zip(CONTAINERS, containers, strict=True):
                attribute.write(own)
        differ = map(operator.is_not, self.attributes, now.attributes)
        for attribute, own in compress(zip(OTHERS, self.attributes, strict=True), differ):
            attribute.write(own)
        if self.values != now.values:
            for value, own, other in zip(VALUES, self.values, now.values, strict=True):
                if own != other:
                    value.write(own)
        self.loggers.restore()


def _copied(values: Sequence[Any]) -> list[Any]:
    return [copy.copy(value) if isinstance(value, CHANGED) else value for value in values]
