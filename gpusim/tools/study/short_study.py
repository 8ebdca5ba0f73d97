"""The short form of both studies, which the demo runs."""

from __future__ import annotations

from pathlib import Path

from gpusim.tools.study.sweeping import sweep
from gpusim.tools.study.training import train

__all__ = ["short"]

REPLICAS = (2, 8, 32, 128, 512)
FORMATS = ("float16", "bfloat16", "bfloat16:stochastic", "float8_e4m3fn:stochastic")
EPOCHS = 30


def short(out: Path, *, seed: int = 0, show: bool = True) -> list[Path]:
    """Sweep and train for some ten seconds; prints two tables, writes two pictures into `out`.

    Returns the paths of the pictures, `study.png` and `training.png`.
    """
    study = sweep(
        replicas=REPLICAS, orders=("linear", "tree"), seeds=(0, 1), input_seed=seed, show=show
    )
    study.show()
    print()
    training = train(FORMATS, epochs=EPOCHS, rate=0.01, seed=seed, show=show)
    training.show()
    return [study.plot(out / "study.png"), training.plot(out / "training.png")]
