"""Figures of matplotlib in one style, and files of them; shared by PopTorch and the tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gpusim.files import atomic_write
from gpusim.optional import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "DASHED", "SUFFIXES", "check_suffix", "figure", "save", "styled", "write"]

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours without yellow, which is hard to see on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHED = (0, (4, 1.6))
STYLE: dict[str, Any] = {
    "axes.edgecolor": "#666666",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.size": 8,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # outlines that publishers' checks accept, and text that can be searched
    "svg.hashsalt": "gpusim",  # the same figure gives the same file
}
# Without a date the same figure gives the same bytes.
UNDATED: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {},
}


@contextmanager
def styled(changes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """A block in which matplotlib has the style of these figures, with `changes` of it.

    **Raises**: ModuleNotFoundError without matplotlib, with the command that installs it.
    """
    require("pictures need", "matplotlib")
    import matplotlib

    style: Any = STYLE | dict(changes or {})  # matplotlib's stubs list every key by name
    with matplotlib.rc_context(style):
        yield


@contextmanager
def figure(
    path: str | PathLike[str], width: float = 5, height: float = 2.4, columns: int = 1
) -> Iterator[Any]:
    """A block that draws into one or more axes, after which the figure is written.

    **Arguments**:

    - `path`: the file, whose suffix names the format.
    - `width`, `height`: in inches.
    - `columns`: the number of axes side by side.

    **Returns**: matplotlib's Axes, or an array of them if `columns` is not 1.

    **Raises**: as `styled` and `write`.

    >>> with figure(getfixture("tmp_path") / "line.svg") as ax:
    ...     _ = ax.plot([1, 3, 2], color=COLOURS[0])
    """
    check_suffix(path)
    with styled():
        from matplotlib.figure import Figure

        drawing = Figure(figsize=(width, height), layout="constrained")
        yield drawing.subplots(1, columns)
        write(drawing, path)


def check_suffix(path: str | PathLike[str], suffixes: Sequence[str] = SUFFIXES) -> str:
    """The suffix of a file, in lower case. **Raises**: ValueError if it is not in `suffixes`."""
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")
    return suffix


def save(figure: Figure, file: IO[bytes], suffix: str, **metadata: Any) -> None:
    """Write a figure into an open file, in the format of `suffix`."""
    about = UNDATED[suffix] | metadata
    figure.savefig(file, format=suffix[1:], dpi=200, metadata=about)


def write(figure: Figure, path: str | PathLike[str], **metadata: Any) -> Path:
    """Write a figure into a file whose suffix names the format. **Returns**: the path.

    **Raises**: ValueError for a suffix that is not one of `SUFFIXES`.
    """
    path = Path(path)
    suffix = check_suffix(path)
    with atomic_write(path, "wb") as file:
        save(figure, file, suffix, **metadata)
    return path
