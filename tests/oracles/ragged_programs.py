"""Random arguments of ragged_all_to_all, and JAX's pseudocode for them in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpusim.collectives import ragged_all_to_all

Array = np.ndarray
NAMES = (
    "operand",
    "output",
    "input_offsets",
    "send_sizes",
    "output_offsets",
    "recv_sizes",
)


@dataclass
class Program:
    """Arguments (R, *batch, ...) of one valid call."""

    arguments: dict[str, Array]
    groups: list[list[int]] | None
    batch_ndim: int

    @property
    def size(self) -> int:
        return len(self.arguments["operand"])

    def call(self, function=ragged_all_to_all, *first, form: str = "stacked", **changed):
        arguments = {**self.arguments, **changed}
        handed_in = [list(x) if form == "list" else x for x in (*first, *arguments.values())]
        return function(*handed_in, groups=self.groups, batch_ndim=self.batch_ndim)

    def sends(self):
        """Each slice: batch entry, sender, slice, rows sent, receiver, rows written."""
        a = self.arguments
        batch = a["send_sizes"].shape[1:-1]
        for groups in [self.groups or [list(range(self.size))]]:
            per_member = a["send_sizes"].shape[-1] // len(groups[0])
            for b in np.ndindex(*batch):
                for members in groups:
                    for sender in members:
                        for i in range(a["send_sizes"].shape[-1]):
                            at = (sender, *b, i)
                            start, rows = a["input_offsets"][at], a["send_sizes"][at]
                            to = a["output_offsets"][at]
                            receiver = members[i // per_member]
                            yield (
                                b,
                                sender,
                                i,
                                slice(start, start + rows),
                                receiver,
                                slice(to, to + rows),
                            )


def random_program(
    rng, size, groups, *, batch=(), row=(), per_member=1, rows=3, overlap=True, ordered=False, gap=1
):
    """A valid program: receivers lay their slices out in any order, or in that of their senders,
    with up to `gap` rows between them."""
    n = size if groups is None else len(groups[0])
    slices = n * per_member
    counts = rng.integers(0, rows + 1, (size, *batch, slices))
    counts[rng.random(counts.shape) < 0.2] = 0
    offsets = np.zeros_like(counts)
    arrive = np.zeros_like(counts)
    received = np.zeros_like(counts)
    most_in, most_out = 1, 1
    for b in np.ndindex(*batch):
        for members in groups or [list(range(size))]:
            for p, receiver in enumerate(members):
                incoming = [
                    (q, sender, p * per_member + j, q * per_member + j)
                    for q, sender in enumerate(members)
                    for j in range(per_member)
                ]
                for _, sender, i, k in incoming:
                    received[(receiver, *b, k)] = counts[(sender, *b, i)]
                at = int(rng.integers(0, 2 * gap + 1))
                order = range(len(incoming)) if ordered else rng.permutation(len(incoming))
                for index in order:
                    _, sender, i, _ = incoming[index]
                    arrive[(sender, *b, i)] = at
                    at += counts[(sender, *b, i)] + int(rng.integers(0, gap + 1))
                most_out = max(most_out, at)
        for sender in range(size):
            at = 0
            for i in rng.permutation(slices):
                offsets[(sender, *b, i)] = at
                at += counts[(sender, *b, i)] * (rng.integers(0, 2) if overlap else 1)
            most_in = max(most_in, at + rows)
    arguments = {
        "operand": rng.integers(1, 99, (size, *batch, most_in, *row)).astype(float),
        "output": -rng.integers(1, 99, (size, *batch, most_out, *row)).astype(float),
        "input_offsets": offsets,
        "send_sizes": counts,
        "output_offsets": arrive,
        "recv_sizes": received,
    }
    return Program(arguments, groups, len(batch))


def reference(program: Program) -> Array:
    result = program.arguments["output"].copy()
    for b, sender, _, sent, receiver, written in program.sends():
        result[(receiver, *b)][written] = program.arguments["operand"][(sender, *b)][sent]
    return result
