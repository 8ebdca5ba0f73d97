"""The comparison of two traces: each tensor's relation, and the first that has none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpusim.words import count

from .collecting import Collector
from .items import OF_WEIGHTS, TOLERANCE, Item, arrangements, largest, whole_of
from .matching import Matching, match
from .relations import (
    Array,
    Near,
    Partition,
    Parts,
    Relation,
    Step,
    contains,
    follow,
    has_rows,
    partitions,
    relate,
    scales_of,
)
from .traces import Event, Trace

__all__ = ["Comparison", "compare"]

ESSENTIAL = (
    "weight",
    "weight gradient",
    "weight gradient, clipped",
    "optimizer state",
    "loss",
    "norm",
    "logged",
    "watched",
)
"""Kinds whose difference is a difference of the programs. The others say where it begins."""
SCALED = ("gradient", "local gradient", "loss")
"""Kinds whose parts may have a factor, as losses are means of other batches."""
ADDED = ("output", "gradient", "local gradient", "loss", "logged", "watched")
"""Kinds whose parts may be added."""
PERMUTED = ("input", "output", "gradient")
ROUNDINGS = 8
"""How many times the difference that one rounding of each output makes is rounding."""
USUAL = 0.9
"""The share of the tensors of a kind whose rounding is taken to be usual."""
SMALL = 1e-3
"""Of the median size of the tensors of its kind: below it a tensor is compared with that."""


@dataclass
class Comparison:
    """The comparison of two traces.

    **Attributes**: `items`, in the order of the reference; `first`, the first without a relation
    that matters; `claims`, DTensors that are not what their placements say; `skipped`, tensors that
    are not compared, with reasons; `said`, sentences; `failure`, why there is
    no comparison.
    """

    reference: Trace
    candidate: Trace
    matching: Matching
    meshes: Sequence[Partition]
    items: list[Item]
    skipped: dict[str, list[str]]
    said: list[str] = field(default_factory=list)
    claims: list[Item] = field(default_factory=list)
    first: Item | None = None
    failure: str = ""

    @property
    def compared(self) -> list[Item]:
        return [item for item in self.items if item.compared]

    @property
    def related(self) -> list[Item]:
        return [item for item in self.compared if item.related]

    @property
    def unrelated(self) -> list[Item]:
        return [item for item in self.compared if not item.related]

    @property
    def equal(self) -> bool:
        return not self.failure and self.first is None

    def before(self, count: int = 3) -> list[Item]:
        """The last related tensors before the first that is not."""
        if self.first is None:
            return []
        near = [
            item
            for item in self.compared
            if item.related and item.order < self.first.order and item.step <= self.first.step
        ]
        telling = [item for item in near if item.relation and not item.relation.trivial]
        return telling[-count:]


def compare(
    reference: Trace,
    candidate: Trace,
    noise: Trace | None = None,
    changing: Collection[str] = (),
) -> Comparison:
    """Compare the trace of a program on several ranks with that of the reference.

    `noise` is the reference with each output changed by a rounding, where both compute in narrow
    dtypes: a difference of that size is rounding. `changing` are logs that differ from
    run to run.
    """
    matching = match(reference, candidate)
    groups = [group for own in candidate.ends("groups") for group in own or ()]
    meshes = partitions(candidate.ranks, groups)
    found = Comparison(reference, candidate, matching, meshes, [], defaultdict(list))
    found.said += matching.said
    collector = Collector(reference, candidate, matching, found.skipped)
    found.items = [item for item in collector.items() if item.name not in changing]
    for name in changing:
        found.skipped["differs from run to run"].append(name)
    bounds = {} if noise is None else rounding(found.items, reference, noise)
    Judge(found, bounds).run()
    return found


def key_of(item: Item) -> tuple[str, str, str, str, int]:
    """By what the same tensor of two runs is known."""
    return item.kind, item.root, item.name, item.leaf, item.step


def rounding(items: Sequence[Item], reference: Trace, noise: Trace) -> dict[Any, float]:
    """Of each tensor, the difference that is rounding: `ROUNDINGS` times that of the noise."""
    others = Collector(reference, noise, match(reference, noise), defaultdict(list)).items()
    changed = {(key_of(item), item.count): item for item in others}
    eps = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
    narrow: dict[str, str] = {}
    for own in reference.ends("narrow"):
        narrow |= own or {}
    least = max((eps[name] for name in narrow if name in eps), default=2.0**-23)
    sizes: dict[Any, tuple[float, float]] = {}
    for item in items:
        other = changed.get((key_of(item), item.count))
        if other is None:
            continue
        try:
            whole, parts = next(arrangements(other))
        except (StopIteration, ValueError):
            continue
        own = [part for part in parts.values() if part.shape == whole.shape]
        apart = max((float(np.abs(part - whole).max(initial=0.0)) for part in own), default=0.0)
        size = float(np.abs(whole).max(initial=0.0))
        before = sizes.get(key_of(item), (0.0, 0.0))
        sizes[key_of(item)] = max(before[0], apart), max(before[1], size)
    # One run of noise shows what happens to most tensors, and not each: Adam's step of an element
    # whose gradient is rounding has either sign. So what tensors of the kind have holds for each.
    usual: dict[Any, list[float]] = defaultdict(list)
    most: dict[Any, float] = defaultdict(float)
    for (kind, _, _, leaf, step), (apart, size) in sizes.items():
        usual[kind, leaf, step].append(apart / size if size else 0.0)
        if kind == "weight":
            most[step] = max(most[step], apart)
    found = {}
    for key, (apart, size) in sizes.items():
        kind, _, _, leaf, step = key
        share = float(np.quantile(usual[kind, leaf, step], USUAL))
        least_apart = most[step] if kind == "weight" else 0.0
        found[key] = ROUNDINGS * max(apart, least_apart, size * max(share, least))
    return found


class Judge:
    """Finds the relation of each tensor, and what does not fit."""

    def __init__(self, found: Comparison, bounds: Mapping[Any, float]) -> None:
        self.found, self.bounds = found, bounds
        self.hints: dict[Any, list[tuple[Step, ...]]] = defaultdict(list)
        ranks = found.candidate.ranks
        batches = {
            len(own) for own in self._losses(found.candidate) + self._losses(found.reference)
        }
        more = {found.reference.ranks, *sorted(batches)[:3]} - {0, 1, ranks}
        self.scales = scales_of(ranks, *sorted(more))
        #: Of sums that are logged, and divided later.
        self.counts = tuple(
            factor for n in range(2, ranks + 1) if ranks % n == 0 for factor in (n, 1 / n)
        )
        if found.reference.ranks > 1:
            self.counts = self.scales
        #: Of each step: the factor of the first gradients.
        self.factor: dict[int, float] = {}
        self.sizes: dict[Any, float] = {}
        #: Of each draw, by which module it was made for: the digests of each rank.
        self.bits: dict[Any, dict[int, str]] = {}

    @staticmethod
    def _losses(trace: Trace) -> list[list[Event]]:
        return [
            [e for e in rank.events if e.kind == "loss" and e.step == 0] for rank in trace.by_rank
        ]

    def run(self) -> None:
        """Judge every item."""
        self._measure()
        unrelated = 0
        for item in self.found.items:
            try:
                self.judge(item, quick=unrelated > 200)
            except ValueError as error:
                item.compared = False
                self.found.skipped[str(error)].append(f"{item.kind} of {item.name or item.root}")
            unrelated += item.compared and not item.related
        self._place_gradients()
        self._steps()
        self.found.failure = self._different_data() or self._nothing_to_say()
        if self.found.failure:
            return
        self.found.first = self._first()
        ends = [own.end for own in (*self.found.reference.by_rank, *self.found.candidate.by_rank)]
        left = sum(end.get("left_out", 0) for end in ends)
        if self.found.first is None and left:
            self.found.failure = (
                f"{count(left, 'tensor')} were left out, as --trace-limit is "
                "reached: the others are related"
            )

    def _measure(self) -> None:
        sizes: dict[Any, list[float]] = defaultdict(list)
        for item in self.found.items:
            sizes[self._size_key(item)].append(largest(item))
        self.sizes = {key: float(np.median(own)) for key, own in sizes.items()}

    @staticmethod
    def _size_key(item: Item) -> Any:
        return item.kind, item.leaf if item.kind == "optimizer state" else "", item.step

    def judge(self, item: Item, quick: bool = False) -> None:
        """Find the relation of an item: of its own call, or of all calls of the step together."""
        self._search(item, quick)
        if item.relation is None and item.together is not None:
            whole = item.together
            if whole.compared and whole.relation is None:
                whole.compared = False  # searched once, for all calls
                self._search(whole, quick)
            item.relation = whole.relation
            if item.relation is None and item.kind == "loss":
                item.compared = item.count == 0  # the first stands for their sum
        if item.relation is None:
            return
        self._check_scale(item)
        self._check_bits(item)
        if item.kind == "weight" and item.step == 0:
            self._check_copies(item)

    def _search(self, item: Item, quick: bool) -> None:
        kind = item.kind
        first, parts = next(arrangements(item))
        scaled = kind in SCALED or (first.size == 1 and kind == "output")
        near = Near(
            TOLERANCE,
            SMALL * self.sizes.get(self._size_key(item), 0.0),
            self.counts if kind == "logged" else self.scales if scaled else (),
            self._rounding_of(item, first, parts),
        )
        item.near = near
        # What was found for the same name counts most; then what others of the kind had.
        own, others = (kind, item.name, item.leaf), (kind, first.ndim)
        hints = [*self.hints[own], *_claimed(item), *self.hints[others][-6:]]
        if kind in OF_WEIGHTS:
            hints = [*self.hints["weight", item.name, ""], *hints]
        for whole, parts in arrangements(item):
            item.relation = relate(
                parts,
                whole,
                self.found.meshes if not quick else (),
                near,
                hints,
                sums=kind in ADDED,
                permutes=kind in PERMUTED,
                pieces=self._may_be_pieces(item),
            )
            if item.relation is not None:
                break
        if item.relation is None:
            if kind == "logged" and any(
                contains(first, part, near) for part in item.parts().values()
            ):
                item.relation = Relation(())
            return
        self._check_claim(item, parts, whole)
        steps = item.relation.steps
        loose = item.relation.permuted or any(step.op == "pieces" for step in steps)
        for key in (own, others):
            if steps not in self.hints[key] and not item.relation.trivial:
                if not (loose and key is others):  # it would fit where a stricter one does
                    self.hints[key].append(steps)

    def _may_be_pieces(self, item: Item) -> bool:
        """Whether rows may be anywhere: a weight's gradients and states are as the weight is."""
        if item.kind not in OF_WEIGHTS or (item.kind == "weight" and item.step == 0):
            return True
        known = self.hints["weight", item.name, ""]
        return any(step.op == "pieces" for steps in known for step in steps)

    def _rounding_of(self, item: Item, whole: Array, parts: Parts) -> float:
        """The difference that is rounding: more where large parts add up to a small sum."""
        bound = self.bounds.get(key_of(item), 0.0)
        size = float(np.abs(whole).max(initial=0.0))
        if not bound or not size:
            return bound
        return bound * max(1.0, *(float(np.abs(p).max(initial=0.0)) / size for p in parts.values()))

    def _check_claim(self, item: Item, parts: Parts, whole: Array) -> None:
        """Note a DTensor that is not what its placements say."""
        claim = next(_claimed(item), None)
        if claim is None or any(step.op == "P" for step in claim):  # of masks and norms too
            return
        if any("/" in each for own in item.claims.values() for each in own.placements):
            return
        if follow(parts, claim, whole, item.near) is None:
            self.found.claims.append(item)

    def _check_scale(self, item: Item) -> None:
        if item.kind != "gradient" or item.relation is None:
            return
        if item.relation.trivial:
            return
        expected = self.factor.setdefault(item.step, item.relation.scale)
        if item.relation.scale == expected:
            return
        # Parts that are the same add up to a multiple, too: the same factor may fit otherwise.
        near = replace(item.near, scales=(expected,))
        for whole, parts in arrangements(item):
            found = relate(parts, whole, self.found.meshes, near, permutes=True)
            if found is not None and found.scale == expected:
                item.relation = found
                return
        item.problem = f"scale {item.relation.scale / expected:.6g}"

    def _check_bits(self, item: Item) -> None:
        """Replicas draw the same random bits, shards others."""
        if item.kind != "bits":
            return
        key = item.root, item.name, item.step, item.count
        first = self.bits.setdefault(key, item.bits)
        for rank, bits in item.bits.items():
            if first.get(rank, bits) != bits:
                item.problem = f"bits again {rank} {rank}"
                return
        parts = item.parts()
        ranks = sorted(item.bits)
        for n, rank in enumerate(ranks):
            for other in ranks[n + 1 :]:
                same = parts[rank].shape == parts[other].shape and np.array_equal(
                    parts[rank], parts[other]
                )
                if same and item.bits[rank] != item.bits[other]:
                    item.problem = f"bits differ {rank} {other}"
                elif not same and item.bits[rank] == item.bits[other] and _inner(item, rank, other):
                    item.problem = item.problem or f"bits same {rank} {other}"

    def _check_copies(self, item: Item) -> None:
        """Shards that are drawn by one seed are copies of each other."""
        if item.relation is None or item.relation.trivial:
            return
        parts = item.parts()
        for step in item.relation.steps:
            for group in step.groups if step.op == "S" else ():
                own = [parts[rank] for rank in group if rank in parts]
                if (
                    len(own) > 1
                    and own[0].size > 4
                    and all(np.array_equal(each, own[0]) for each in own[1:])
                ):
                    item.problem = "copies"

    def _place_gradients(self) -> None:
        """Put gradients of weights that are wrong where backward made them, if they were then."""
        local = {
            (item.root, item.name, item.step): item.related
            for item in self.found.compared
            if item.kind == "local gradient"
        }
        backward = {
            (item.root, item.name, item.step): item.order
            for item in self.found.compared
            if item.kind == "gradient"
        }
        reduced: dict[int, int] = {}
        for item in self.found.compared:
            if item.kind == "weight gradient":
                reduced[item.step] = min(item.order, reduced.get(item.step, item.order))
        for item in self.found.unrelated:
            key = item.root, item.name, item.step
            if item.kind == "weight gradient" and not item.added:  # FSDP's, whose hooks are its own
                owner = item.name.rpartition(".")[0]
                item.added = backward.get((item.root, owner, item.step), 0)
            if item.kind == "weight gradient" and item.added:
                at_fault = not local.get(key, False)
                item.order = item.added if at_fault else reduced[item.step]
        self.found.items.sort(key=lambda item: (item.step, item.order, item.added))

    def _steps(self) -> None:
        """Whether all ranks made as many optimizer steps, and as many as the reference."""
        whole = max(steps or 0 for steps in self.found.reference.ends("steps"))
        made = {rank.rank: rank.end.get("steps", 0) for rank in self.found.candidate.by_rank}
        if len({whole, *made.values()}) < 2 or not whole or not any(made.values()):
            return
        item = Item(
            "optimizer state",
            "",
            "steps",
            "",
            min(whole, *made.values()),
            0,
            0,
            lambda how=0: np.asarray(float(whole)),
            lambda how=0: {rank: np.asarray(float(count)) for rank, count in made.items()},
            tuple(made),
        )
        counts = ", ".join(f"{count} on rank {rank}" for rank, count in made.items())
        item.problem = f"steps {counts}; the reference makes {whole}"
        self.found.items.append(item)
        self.found.items.sort(key=lambda item: (item.step, item.order, item.added))

    def _different_data(self) -> str:
        """A message if the programs read different data, which makes all else meaningless."""
        inputs = [item for item in self.found.compared if item.kind == "input" and item.step == 0]
        wrong = [item for item in inputs if not item.related]
        if not inputs or not wrong or len(wrong) < len(inputs):
            return ""
        item = wrong[0]
        whole = whole_of(item)
        if whole is None or not whole.ndim:
            return ""
        parts = {
            rank: part
            for rank, part in item.parts().items()
            if part.ndim and part.shape[1:] == whole.shape[1:] and part.dtype == whole.dtype
        }
        unknown = [rank for rank, part in parts.items() if not has_rows(whole, part, item.near)]
        if not unknown:
            return ""
        return (
            f"the programs read different data: the {item.label} on ranks {unknown} has samples "
            "that the reference lacks. The candidate's ranks read data of their own, as by a seed "
            "of the rank: let the reference read the same global batch (DataLoaders are followed)"
        )

    def _nothing_to_say(self) -> str:
        """A message if nothing essential could be compared."""
        steps = [min(trace.ends("steps")) for trace in (self.found.reference, self.found.candidate)]
        if not all(steps) and any(steps):
            lacks = "candidate" if steps[0] else "reference"
            return f"the {lacks} made no step of an optimizer of torch's, the other program did"
        counts = [
            item
            for item in self.found.compared
            if item.kind in ESSENTIAL or (item.kind == "output" and not item.name)
        ]
        if counts:
            return ""
        return "no weight, loss or output has the same name in both programs"

    def _first(self) -> Item | None:
        """The first item without a relation, if one is essential."""
        wrong = self.found.unrelated
        essential = [item for item in wrong if item.kind in ESSENTIAL or item.problem[:4] == "bits"]
        evaluation = not any(self.found.reference.ends("trained"))
        if evaluation:
            essential += [item for item in wrong if item.kind == "output" and not item.name]
        if not essential:
            return None
        outputs: dict[tuple[str, str, int], bool] = {}
        for item in self.found.compared:
            if item.kind == "output":
                key = item.root, item.name, item.step
                outputs[key] = outputs.get(key, True) and item.related
        # In the step before the first that is wrong in what counts, all has come out right; but
        # weights are seen at the begin of the next one.
        begin = essential[0].step - (essential[0].kind == "weight")
        last = max(item.order for item in essential if item.step == essential[0].step)
        for item in self.found.compared:
            if item.step < begin:
                continue
            if item.related:
                if self._is_mixed(item) or self._is_odd(item):
                    return item
                continue
            if item.kind == "local gradient":
                continue
            if item.kind == "logged" and self._follows(item, essential):
                continue
            if item.kind == "output" and self._is_inside(item, outputs):
                continue
            if item.kind == "gradient" and not self._has_effect(item):
                continue
            if item.kind == "input" or (item.step == essential[0].step and item.order > last):
                continue
            return item
        return essential[0]

    @staticmethod
    def _is_mixed(item: Item) -> bool:
        """Whether an output's rows are in an order that neither samples nor experts explain.

        It is a place where a difference may begin, and none by itself.
        """
        if item.kind != "output" or item.relation is None or not item.relation.permuted:
            return False
        whole = whole_of(item)
        if whole is None or whole.ndim < 3 or item.calls > 1 or item.together is not None:
            return False
        item.problem = "order"
        return True

    def _is_odd(self, item: Item) -> bool:
        """Whether a number, as a loss, has a factor that no mean over its ranks explains.

        It is a place where a difference may begin, and none by itself.
        """
        relation = item.relation
        if item.kind not in ("output", "loss") or relation is None or item.calls > 1:
            return False
        if self.found.reference.ranks > 1:
            return False
        if relation.scale == 1 or item.together is not None or relation.permuted:
            return False
        summed = [len(step.groups[0]) for step in relation.steps if step.op == "P"]
        if relation.scale in (np.prod(summed), 1):
            return False
        item.problem = f"scale {relation.scale}"
        return True

    @staticmethod
    def _follows(item: Item, essential: Sequence[Item]) -> bool:
        """Whether a log may be of what is seen after it: wrong gradients, or their norm."""
        kinds = ("weight gradient", "norm")
        return any(other.kind in kinds and other.step == item.step for other in essential)

    @staticmethod
    def _is_inside(item: Item, outputs: Mapping[tuple[str, str, int], bool]) -> bool:
        """Whether an outer module's output is related: then the inner one is its own affair."""
        name = item.name
        while name:
            name = name.rpartition(".")[0]
            found = outputs.get((item.root, name, item.step))
            if found is not None:
                return found
        return False

    def _has_effect(self, item: Item) -> bool:
        """Whether a weight's gradient that comes later in the step is wrong."""
        return any(
            other.kind in ESSENTIAL and other.step == item.step and other.order > item.order
            for other in self.found.unrelated
        )


def _claimed(item: Item) -> Iterator[tuple[Step, ...]]:
    """The relation that a DTensor's placements claim."""
    claim = next(iter(item.claims.values()), None)
    if claim is None:
        return
    mesh = np.asarray(claim.mesh)
    if mesh.ndim != len(claim.placements):
        return
    steps = []
    for axis in reversed(range(mesh.ndim)):
        rows = np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis])
        groups = tuple(tuple(map(int, row)) for row in rows)
        placement = claim.placements[axis]
        if placement[0] == "S":
            steps.append(Step("S", groups, int(placement[1:].partition("/")[0])))
        else:
            steps.append(Step(placement[0], groups))
    yield tuple(steps)


def _inner(item: Item, rank: int, other: int) -> bool:
    """Whether two ranks hold shards of another dimension than the batch's."""
    if item.relation is None:
        return False
    for step in item.relation.steps:
        for group in step.groups:
            if rank in group and other in group:
                return step.op == "S" and step.dim > 0
    return False
