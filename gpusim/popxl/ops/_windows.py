"""The geometry that convolutions and pools share: kernels that slide over padded images.

A kernel's taps are slices of the padded image, so that a sum over taps needs no copy of windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .._definition import Array

PAD_TYPES = ("not_set", "same_upper", "same_lower", "valid")


@dataclass(frozen=True)
class Windows:
    """How a kernel slides over the spatial axes of an image."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  #: elements padded before each axis; negative ones are cut off
    after: tuple[int, ...]
    out: tuple[int, ...]  #: the number of windows along each axis

    @property
    def reach(self) -> tuple[int, ...]:
        """The length of image that one window spans along each axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """The length of the padded image that windows touch (ceil mode may go beyond `after`)."""
        sides = zip(self.image, self.before, self.after, self.out, strict=True)
        spans = zip(self.stride, self.reach, strict=True)
        return tuple(
            max(n + b + a, (o - 1) * s + r)
            for (n, b, a, o), (s, r) in zip(sides, spans, strict=True)
        )

    def taps(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Each position in the kernel, with the slices of the padded image under it."""
        for position in itertools.product(*map(range, self.kernel)):
            yield (
                position,
                tuple(
                    slice(p * d, p * d + (o - 1) * s + 1, s)
                    for p, d, s, o in zip(
                        position, self.dilation, self.stride, self.out, strict=True
                    )
                ),
            )


def windows(
    image: Sequence[int],
    kernel: Sequence[int],
    *,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    pad_type: str = "not_set",
    ceil_mode: bool = False,
) -> Windows:
    """The windows of a kernel over an image's spatial axes.

    `padding` has the lengths before all axes, then those after them. "same" pads so that there is
    a window for every stride.

    **Raises**: ValueError: if the sizes leave no window or do not match the axes.

    >>> windows((5,), (3,), stride=(2,), pad_type="same_upper").out
    (3,)
    """
    rank = len(image)
    stride = tuple(stride or (1,) * rank)
    dilation = tuple(dilation or (1,) * rank)
    padding = tuple(padding or (0,) * (2 * rank))
    _check_sizes(rank, {"kernel": kernel, "stride": stride, "dilation": dilation}, padding)
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    before, after = padding[:rank], padding[rank:]
    if pad_type.startswith("same"):
        before, after = _same(image, reach, stride, pad_type)
    elif pad_type == "valid":
        before = after = (0,) * rank
    sizes = zip(image, before, after, reach, stride, strict=True)
    out = tuple(_count(*each, ceil_mode) for each in sizes)
    if min(out) < 1:
        raise ValueError(
            f"A kernel of {tuple(kernel)} does not fit an image of {tuple(image)} padded by "
            f"{padding}"
        )
    return Windows(tuple(image), tuple(kernel), stride, dilation, before, after, out)


def _check_sizes(rank: int, named: Mapping[str, Sequence[int]], padding: tuple[int, ...]) -> None:
    for name, sizes in named.items():
        if len(sizes) != rank or any(size < 1 for size in sizes):
            raise ValueError(
                f"{name} must have {rank} positive numbers, one for each spatial axis, but it is "
                f"{tuple(sizes)}"
            )
    if len(padding) != 2 * rank:
        raise ValueError(
            f"padding must have {2 * rank} numbers, before and after each spatial axis, but it is "
            f"{padding}"
        )


def _same(
    image: Sequence[int], reach: Sequence[int], stride: Sequence[int], pad_type: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding before and after with which there is a window for every stride."""
    sizes = zip(image, reach, stride, strict=True)
    missing = [max(0, (-(-n // s) - 1) * s + r - n) for n, r, s in sizes]
    less, more = tuple(m // 2 for m in missing), tuple(m - m // 2 for m in missing)
    return (less, more) if pad_type == "same_upper" else (more, less)


def _count(size: int, before: int, after: int, reach: int, stride: int, ceil_mode: bool) -> int:
    """The number of windows along an axis."""
    room = size + before + after - reach
    if not ceil_mode:
        return room // stride + 1
    count = -(-room // stride) + 1
    # As in PyTorch, no window starts in the padding after the image.
    return count - 1 if (count - 1) * stride >= size + before else count


def pad(xp: ModuleType, x: Array, w: Windows, fill: Any = 0) -> Array:
    """[..., *image] as [..., *padded]."""
    if w.padded == w.image and not any(w.before):
        return x
    lead = x.shape[: x.ndim - len(w.image)]
    out = xp.full((*lead, *w.padded), fill, x.dtype)
    inside, source = _overlap(w)
    out[(..., *inside)] = x[(..., *source)]
    return out


def unpad(xp: ModuleType, padded: Array, w: Windows) -> Array:
    """The inverse of `pad` for gradients: drop the padding."""
    if w.padded == w.image and not any(w.before):
        return padded
    lead = padded.shape[: padded.ndim - len(w.image)]
    out = xp.zeros((*lead, *w.image), padded.dtype)
    inside, source = _overlap(w)
    out[(..., *source)] = padded[(..., *inside)]
    return out


def _overlap(w: Windows) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of the padded image that the image covers, and that part of the image."""
    inside, source = [], []
    for n, b, whole in zip(w.image, w.before, w.padded, strict=True):
        first = max(0, -b)
        last = min(n, whole - b)
        inside.append(slice(first + b, last + b))
        source.append(slice(first, last))
    return tuple(inside), tuple(source)
