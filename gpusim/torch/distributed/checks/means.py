"""Means that a rank takes, and where they go: into a backward pass, or into a collective.

`averages` compares the notes of all ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .averages import analyse
from .digests import address, element, largest, local_part, number, values
from .taking import install

if TYPE_CHECKING:
    from .watch import Call, Watch

__all__ = ["Means", "analyse", "install"]

MARK = "gpusim mean"
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Clone", "Alias", "View", "Squeeze")
"""Nodes of autograd's graph between a mean and the loss that it is a part of."""
RECENT, TERMS, ELEMENTS, MOST = 64, 128, 16, 1024
"""How many means are remembered, sums of a line, elements of a call, and how many rows noted."""
GATHERS = ("all_gather", "all_gather_into_tensor")


class Mean(NamedTuple):
    """A mean: where it was taken, of how many elements, and its value."""

    site: str
    elements: float
    value: float


class Means:
    """A rank's means. Owner: the rank's thread."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._means: deque[Mean] = deque(maxlen=RECENT)
        # Of each line, its values and their counts, in the program's order.
        self._taken: dict[str, deque[tuple[float, float]]] = {}
        self._summed: dict[str, deque[tuple[float, float]]] = {}
        self._sums: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._gathered: deque[tuple[dict[str, Any], list[Tensor]]] = deque(maxlen=4)
        self._rows: list[dict[str, Any]] = []
        self._backward: dict[str, Any] | None = None
        # A parameter, a place in its gradient, and the value that the backward pass left there.
        self._probe: tuple[weakref.ref[Tensor], int, float, int] | None = None

    # What the program computes

    def see_mean(self, result: Any, count: float) -> None:
        """A mean of so many elements has been computed."""
        value = self._scalar(result)
        if value is None or count <= 0:
            return
        mean = Mean(self.watch.site(), count, value)
        self._means.append(mean)
        terms = self._taken.setdefault(mean.site, deque(maxlen=TERMS))
        terms.append((value, count))
        if result.grad_fn is not None:
            result.grad_fn.metadata[MARK] = mean

    def see_sum(self, result: Any, count: int) -> None:
        """A sum of so many elements has been computed."""
        value = self._scalar(result, floating=False)
        if value is None:
            return
        self._sums[id(result)] = result
        terms = self._summed.setdefault(self.watch.site(), deque(maxlen=TERMS))
        terms.append((value, count))

    def see_division(self, result: Any, dividend: Any, divisor: Any) -> None:
        """A tensor has been divided: it is a mean, if it is a sum and the divisor counts."""
        if self._sums.get(id(dividend)) is not dividend:
            return
        count = number(divisor)
        if count is not None and count >= 1 and count == int(count):
            self.see_mean(result, count)

    def see_average(self, tensor: Tensor) -> None:
        """A tensor's mean is computed: it may be that of gathered means."""
        for row, outputs in self._gathered:
            with self.watch.busy():
                gathered = [value for each in outputs for value in values(each, ELEMENTS * 16)]
                if gathered and len(gathered) == tensor.numel():
                    if sorted(gathered) == sorted(values(tensor, len(gathered))):
                        row["averaged"] = row["averaged"] or self.watch.site()

    def _scalar(self, result: Any, floating: bool = True) -> float | None:
        if not isinstance(result, Tensor) or result.dim() or local_part(result) is not result:
            return None
        if floating and not result.is_floating_point():
            return None
        return number(result)

    # Where they go

    def begin_backward(self, roots: Sequence[Any], args: Any, named: Any) -> None:
        """A backward pass begins."""
        self._backward = self._probe = None
        gradient = args[0] if args else named.get("grad_tensors")
        if len(roots) != 1 or gradient is not None or not isinstance(roots[0], Tensor):
            return
        root = roots[0]
        value = self._scalar(root)
        if value is None or root.grad_fn is None or len(self._rows) >= MOST:
            return
        with self.watch.busy():
            found = [
                [mean.site, mean.elements, factor]
                for mean, factor in _means_in(root, value)
                if factor is not None
            ]
        if found:
            self._backward = {"kind": "backward", "site": self.watch.site(), "means": found}
            self._backward.update(by_torch=[], by_hand=[])
            self._rows.append(self._backward)

    def end_backward(self) -> None:
        """It ends: the gradient of one parameter is remembered, to see by what it is multiplied."""
        self._probe = None
        if self._backward is None or self._backward["by_torch"]:
            return
        with self.watch.busy():
            gradients = [
                (parameter, parameter.grad)
                for parameter in self.watch.replicas.parameters()
                if parameter.grad is not None
            ]
            for parameter, gradient in gradients:
                place, value = largest(gradient)
                if value:
                    total = sum(each.numel() for _, each in gradients)
                    self._probe = weakref.ref(parameter), place, value, total
                return

    def see_call(self, call: Call) -> None:
        """A call has been posted."""
        given, label = call.given, call.group._key.label
        if len(call.group._key.ranks) < 2:
            return
        if call.inside == "torch":
            summing = call.operation in ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
            if self.watch.in_backward and summing and self._backward is not None:
                if not self.watch.replicas.is_linked(label):
                    self._add(self._backward["by_torch"], label)
            return
        adds = "SUM" in given.op or "AVG" in given.op
        if not given.written or len(self._rows) >= MOST:
            return
        if call.operation == "all_reduce" and adds and self._probe is not None:
            self._see_gradient(call)
        if (call.operation in ("all_reduce", "reduce") and adds) or call.operation in GATHERS:
            self._see_values(call)

    def _see_gradient(self, call: Call) -> None:
        """By what the gradient has been multiplied since the backward pass, if the call has it."""
        assert self._probe is not None and self._backward is not None
        parameter, place, value, total = self._probe
        owner = parameter()
        gradient = None if owner is None else owner.grad
        for tensor in call.given.written:
            is_own = gradient is not None and address(tensor) == address(gradient)
            if not is_own and tensor.numel() != total:
                continue
            now = element(tensor, place)
            if now is not None:
                self._backward["by_hand"].append([call.group._key.label, now / value, call.site])
                self._probe = None
            return

    def _see_values(self, call: Call) -> None:
        """The elements of a small operand that are means."""
        given = call.given
        gathers = call.operation in GATHERS
        operands = given.only_read if gathers else given.written
        if len(operands) != 1 or not operands[0].numel() <= ELEMENTS:
            return
        tensor = operands[0]
        if not tensor.is_floating_point():
            return
        found = [self._candidates(value) for value in values(tensor, ELEMENTS)]
        if any(found):
            label = call.group._key.label
            row = {"kind": "gather" if gathers else "call", "site": call.site, "label": label}
            row.update(operation=call.operation, means=found, averaged="")
            self._rows.append(row)
            if gathers:
                self._gathered.append((row, list(given.written)))

    def _candidates(self, value: float) -> dict[str, list[float]]:
        """The counts of the means that a value may be, by their lines."""
        found: dict[str, list[float]] = {}
        if value in (0.0, 1.0) or value != value:
            return found
        for mean in self._means:
            if _is(value, mean.value):
                self._add(found.setdefault(mean.site, []), mean.elements)
        for site, terms in self._taken.items():  # means of batches, averaged over them
            total = weighed = count = 0.0
            for length, (term, own) in enumerate(reversed(terms), 1):
                total, weighed, count = total + term, weighed + term * own, count + own
                if length > 1 and (_is(value, total / length) or _is(value, weighed / count)):
                    self._add(found.setdefault(site, []), count)
        for site, terms in self._summed.items():  # a sum, divided as numbers
            total = count = 0.0
            for own, elements in reversed(terms):
                total, count = total + own, count + elements
                if count and _is(value, total / count):
                    self._add(found.setdefault(site, []), count)
        return found

    @staticmethod
    def _add(found: list[Any], value: Any) -> None:
        if value not in found:
            found.append(value)

    def finish(self) -> None:
        if self._rows:
            self.watch.log.rows["means"] = self._rows


def _is(value: float, other: float) -> bool:
    """Whether a number is another one in float32, or nearer."""
    return abs(value - other) <= 2e-7 * abs(other)


def _means_in(root: Tensor, value: float) -> Iterator[tuple[Mean, float | None]]:
    """The means that a loss is made of, each with its factor, or None where it is not known."""
    queue: list[tuple[Any, frozenset[str]]] = [(root.grad_fn, frozenset())]
    found: list[tuple[Mean, frozenset[str]]] = []
    left = 64
    while queue and left:
        node, way = queue.pop()
        left -= 1
        mean = node.metadata.get(MARK)
        if mean is not None:
            found.append((mean, way))
        elif node.name().startswith(ARITHMETIC):
            way |= {node.name()[:3]}
            queue += [(each, way) for each, _ in node.next_functions if each is not None]
    for mean, way in found:
        if not way & {"Mul", "Div", "Neg"}:
            yield mean, 1.0
        elif mean.value and not way & {"Add", "Sub"}:
            yield mean, value / mean.value
        else:
            yield mean, None
