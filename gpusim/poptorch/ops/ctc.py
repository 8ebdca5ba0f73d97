"""CTC's beam search: which texts are most likely, of the chances that each time step gives."""

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


@operation
def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> list[Tensor]:
    """The most likely texts of a connectionist temporal classification.

    A text's chance is the sum of those of all ways to write it: with blanks between its classes and
    with classes repeated.

    **Arguments**

    - `probs`: (input_length, batch_size, num_classes), logarithms of chances.
    - `lengths`: (batch_size,) integers: how many steps of each input count.
    - `blank`: the class that is the blank.
    - `beam_width`: how many texts are kept at each step, at least top_paths.
    - `top_paths`: how many are returned.

    poptorch.Error for what are no tensors, and for other shapes; ValueError for numbers that are
    not so. There is no gradient.

    **Returns**

    A list of (batch_size, top_paths) logarithms of chances, in the dtype of `probs`; (batch_size,
    top_paths) int32 lengths of texts; and (batch_size, top_paths, input_length) int32 texts, with
    blanks behind them. Where there are fewer texts, the rest is empty, with a chance of 0.

    >>> import torch
    >>> probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log().unsqueeze(1)
    >>> chances, lengths, texts = ctc_beam_search_decoder(probs, torch.tensor([2]), top_paths=2)
    >>> chances.exp()  # of "1", written 1-, -1 or 11; and of no text
    tensor([[0.6400, 0.3600]])
    >>> lengths.tolist(), texts.tolist()
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
    texts = torch.full((batch, paths, steps), blank, dtype=torch.int32)
    for number, length in enumerate(lengths.tolist()):
        own = probs[: min(max(length, 0), steps), number].double().numpy()
        for path, (text, score) in enumerate(beams(own, blank, arguments["beam_width"])[:paths]):
            scores[number, path], sizes[number, path] = score, len(text)
            texts[number, path, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return [scores.to(probs.dtype), sizes, texts]


HOST["ctc"] = HostFunction(_likes, _compute)


def beams(probs: Array, blank: int, width: int) -> list[tuple[tuple[int, ...], float]]:
    """The texts that are left after the last step, the most likely first, with their chances.

    Args:
        probs: (steps, classes), logarithms.
        blank: the class that is the blank.
        width: how many texts are kept.

    Example:
        >>> beams(np.log([[0.6, 0.4]]), 0, 2)
        [((), -0.5108256237659907), ((1,), -0.916290731874155)]
    """
    texts: list[tuple[int, ...]] = [()]
    blanks, others = np.zeros(1), np.full(1, -np.inf)  # of those that end in a blank, or do not
    for step in probs:
        texts, blanks, others = _stepped(step, texts, blanks, others, blank, width)
    total = np.logaddexp(blanks, others)
    order = np.argsort(-total, kind="stable")
    return [(texts[place], float(total[place])) for place in order if total[place] > -np.inf]


def _stepped(
    step: Array, texts: list[tuple[int, ...]], blanks: Array, others: Array, blank: int, width: int
) -> tuple[list[tuple[int, ...]], Array, Array]:
    """One step: each text stays as it is, or gets one more class."""
    total = np.logaddexp(blanks, others)
    last = np.array([text[-1] if text else blank for text in texts])
    stay_blanks = total + step[blank]
    stay_others = np.where(last == blank, -np.inf, others + step[last])
    more = total[:, None] + step
    written = np.arange(len(texts))
    more[written, last] = blanks + step[last]  # a class again, after a blank
    more[:, blank] = -np.inf
    places = {text: place for place, text in enumerate(texts)}
    for place, text in enumerate(texts):
        parent = places.get(text[:-1]) if text else None
        if parent is not None:  # the same text, kept and made longer
            stay_others[place] = np.logaddexp(stay_others[place], more[parent, text[-1]])
            more[parent, text[-1]] = -np.inf
    scores = np.concatenate([np.logaddexp(stay_blanks, stay_others), more.ravel()])
    best = np.argsort(-scores, kind="stable")[:width]
    best = best[scores[best] > -np.inf]
    kept, longer = best[best < len(texts)], best[best >= len(texts)] - len(texts)
    parents, classes = np.divmod(longer, step.size)
    return (
        [texts[place] for place in kept]
        + [(*texts[p], int(c)) for p, c in zip(parents, classes, strict=True)],
        np.concatenate([stay_blanks[kept], np.full(len(longer), -np.inf)]),
        np.concatenate([stay_others[kept], more.ravel()[longer]]),
    )
