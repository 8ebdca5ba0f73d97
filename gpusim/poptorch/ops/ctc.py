"""CTC's beam search: the most likely labellings, from the probabilities of each time step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..poptorch_core import compiler_error, createPoptorchError
from .host import HOST, HostFunction, Like, on_host
from .operation import operation

__all__ = ["beams", "ctc_beam_search_decoder"]

Array = np.ndarray[Any, Any]
Labels = tuple[int, ...]


@operation
def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> list[Tensor]:
    """The most likely labellings of a connectionist temporal classification.

    The probability of a labelling is the sum of those of its alignments: with blanks between its
    classes, and with classes repeated.

    **Arguments**

    - `probs`: (input_length, batch_size, num_classes), logarithms of probabilities.
    - `lengths`: (batch_size,) integers: the number of steps of each input.
    - `blank`: the class of the blank.
    - `beam_width`: the number of labellings after each step, at least top_paths.
    - `top_paths`: the number of labellings in the result.

    **Returns**

    A list of three tensors without gradients. Labellings that do not exist are empty, with a
    probability of 0.

    - (batch_size, top_paths): logarithms of probabilities, in the dtype of `probs`.
    - (batch_size, top_paths): lengths of labellings, int32.
    - (batch_size, top_paths, input_length): labellings, int32, padded with blanks.

    **Raises**: poptorch.Error for arguments that are not tensors, and for other shapes; ValueError
    for numbers out of range.

    >>> import torch
    >>> probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log().unsqueeze(1)
    >>> scores, lengths, labels = ctc_beam_search_decoder(probs, torch.tensor([2]), top_paths=2)
    >>> scores.exp()  # of "1", with the alignments 1-, -1 and 11; and of the empty labelling
    tensor([[0.6400, 0.3600]])
    >>> lengths.tolist(), labels.tolist()
    ([[1, 0]], [[[1, 0], [0, 0]]])
    """
    for name, value in (("probs", probs), ("lengths", lengths)):
        if not isinstance(value, Tensor):
            raise createPoptorchError(
                f"ctc_beam_search_decoder: {name} must be a torch.tensor argument. {type(value)} "
                "is not supported."
            )
    if probs.dim() != 3:
        raise compiler_error("Incorrect shape for first input to CTC beam search decoder.")
    if tuple(lengths.shape) != (probs.shape[1],):
        raise createPoptorchError(
            f"ctc_beam_search_decoder: lengths must have the shape ({probs.shape[1]},), got "
            f"{tuple(lengths.shape)}"
        )
    if not 0 <= blank < probs.shape[2]:
        raise ValueError(
            f"ctc_beam_search_decoder: blank must be one of {probs.shape[2]} classes, got {blank}"
        )
    if not 1 <= top_paths <= beam_width:
        raise ValueError(
            "ctc_beam_search_decoder: top_paths must be from 1 to beam_width, got "
            f"{top_paths} and {beam_width}"
        )
    return on_host("ctc", [probs, lengths], blank=blank, beam_width=beam_width, top_paths=top_paths)


def _likes(operands: Sequence[Like], arguments: dict[str, Any]) -> list[Like]:
    (steps, batch, _), dtype = operands[0]
    paths = arguments["top_paths"]
    return [
        Like((batch, paths), dtype),
        Like((batch, paths), torch.int32),
        Like((batch, paths, steps), torch.int32),
    ]


def _compute(operands: list[Tensor], arguments: dict[str, Any]) -> list[Tensor]:
    probs, lengths = operands
    steps, batch, _ = probs.shape
    paths, blank = arguments["top_paths"], arguments["blank"]
    scores = torch.full((batch, paths), -torch.inf, dtype=torch.float64)
    sizes = torch.zeros(batch, paths, dtype=torch.int32)
    labellings = torch.full((batch, paths, steps), blank, dtype=torch.int32)
    for number, length in enumerate(lengths.tolist()):
        own = probs[: min(max(length, 0), steps), number].double().numpy()
        for path, (labels, score) in enumerate(beams(own, blank, arguments["beam_width"])[:paths]):
            scores[number, path], sizes[number, path] = score, len(labels)
            labellings[number, path, : len(labels)] = torch.tensor(labels, dtype=torch.int32)
    return [scores.to(probs.dtype), sizes, labellings]


HOST["ctc"] = HostFunction(_likes, _compute)


def beams(probs: Array, blank: int, width: int) -> list[tuple[tuple[int, ...], float]]:
    """The labellings after the last step, the most likely first, with their probabilities.

    **Arguments**:

    - `probs`: (steps, classes), logarithms.
    - `blank`: the class of the blank.
    - `width`: the number of labellings after each step.

    >>> beams(np.log([[0.6, 0.4]]), 0, 2)
    [((), -0.5108256237659907), ((1,), -0.916290731874155)]
    """
    labellings: list[Labels] = [()]
    blanks, others = np.zeros(1), np.full(1, -np.inf)  # of alignments that end in a blank, or not
    for step in probs:
        labellings, blanks, others = _advance(step, labellings, blanks, others, blank, width)
    total = np.logaddexp(blanks, others)
    order = np.argsort(-total, kind="stable")
    return [(labellings[place], float(total[place])) for place in order if total[place] > -np.inf]


def _advance(
    step: Array, labellings: list[Labels], blanks: Array, others: Array, blank: int, width: int
) -> tuple[list[Labels], Array, Array]:
    """One step: each labelling stays the same, or gets one more class."""
    total = np.logaddexp(blanks, others)
    last = np.array([labels[-1] if labels else blank for labels in labellings])
    stay_blanks = total + step[blank]
    stay_others = np.where(last == blank, -np.inf, others + step[last])
    more = total[:, None] + step
    more[np.arange(len(labellings)), last] = blanks + step[last]  # a class again, after a blank
    more[:, blank] = -np.inf
    places = {labels: place for place, labels in enumerate(labellings)}
    for place, labels in enumerate(labellings):
        parent = places.get(labels[:-1]) if labels else None
        if parent is not None:  # the parent with one more class is this labelling
            stay_others[place] = np.logaddexp(stay_others[place], more[parent, labels[-1]])
            more[parent, labels[-1]] = -np.inf
    scores = np.concatenate([np.logaddexp(stay_blanks, stay_others), more.ravel()])
    best = np.argsort(-scores, kind="stable")[:width]
    best = best[scores[best] > -np.inf]
    same, longer = best[best < len(labellings)], best[best >= len(labellings)] - len(labellings)
    parents, classes = np.divmod(longer, step.size)
    return (
        [labellings[place] for place in same]
        + [(*labellings[p], int(c)) for p, c in zip(parents, classes, strict=True)],
        np.concatenate([stay_blanks[same], np.full(len(longer), -np.inf)]),
        np.concatenate([stay_others[same], more.ravel()[longer]]),
    )
