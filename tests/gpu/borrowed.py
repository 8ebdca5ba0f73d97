"""Results and compiled kernels, on their way to a borrowed machine and back.

`make gpu ARGS='--carry .gpu/last'` begins with what is in that folder, and leaves in the folder of
the results what the next run, perhaps on another machine, begins with.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

__all__ = ["END", "KERNELS", "leave", "pack", "take", "unpack"]

KERNELS = "kernels.txz"
COMMIT = "commit"  # of the checkout, which travels without its repository
END = 12.0  # seconds that packing may take


def take(folder: Path, out: Path, work: Path) -> None:
    """Take the results and kernels of earlier runs; those of this machine, if it has its own."""
    for place in (folder, work / "kept"):
        for path in place.glob("gpu-*"):
            shutil.copyfile(path, out / path.name)  # without its mode: it may be read-only
    if (folder / COMMIT).exists():
        os.environ.setdefault("GPUSIM_COMMIT", (folder / COMMIT).read_text().strip())
    if not (work / "cache" / "gpusim").exists():
        unpack(folder / KERNELS, work)


def unpack(packed: Path, work: Path) -> None:
    """Unpack the kernels; those of an archive that is cut or broken are compiled again."""
    try:
        with tarfile.open(packed) as archive:
            # Owners and modes are this user's: the cache is used only if no one else can write.
            archive.extractall(work, filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        if packed.exists():
            print(f"make gpu: {packed.name} is not used: {error}")


def leave(out: Path, work: Path) -> None:
    """Leave the kernels in `out`, and the results here for a next command."""
    kept = work / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    for path in out.glob("gpu-*"):
        shutil.copyfile(path, kept / path.name)
    if (work / "cache").exists():  # the fake GPU has none
        pack(work, out)


def pack(work: Path, folder: Path) -> None:
    part = work / KERNELS
    with tarfile.open(part, "w:xz", preset=0) as archive:
        archive.add(work / "cache", "cache")
    shutil.move(part, folder / KERNELS)
