"""The demo: data-parallel training on handwritten digits, by order and precision of the sums.

`run` is `gpusim demo`. It needs the extra `study`.
"""

from __future__ import annotations

from pathlib import Path

from gpusim.optional import require

__all__ = ["run"]


def run(*, replicas: int = 64, epochs: int = 30, seed: int = 0, out: Path = Path("demo")) -> None:
    """Train once per variant on `replicas` replicas, print a table, write it and a picture.

    Then run the short precision studies (see `gpusim.study.short`).

    **Arguments**:

    - `replicas`: how many replicas share each batch, 1 to the number of training images.
    - `epochs`: passes over the training images.
    - `seed`: seeds the initial weights and the order of the images.
    - `out`: folder for `digits.csv`, and for `digits.png` and the pictures of the studies,
      `study.png` and `training.png`; made if missing.

    **Raises**:

    - ModuleNotFoundError: a package of the extra `study` is missing.
    - ValueError: more replicas than training images.
    - NotADirectoryError: `out` is a file.
    """
    require("the demo needs", "sklearn", "matplotlib", "rich")
    from gpusim.tools import digits
    from gpusim.tools.demo import picture, table, training
    from gpusim.tools.progress import progress
    from gpusim.tools.study.short_study import short

    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out: a folder is needed, {str(out)!r} is a file")
    data = digits.load(replicas, seed)
    out.mkdir(parents=True, exist_ok=True)  # now: after training is too late to fail
    with progress(len(training.VARIANTS) * epochs * data.steps) as advance:
        runs = [training.train(data, variant, epochs, advance) for variant in training.VARIANTS]
    results = training.compare(runs)
    table.show(results, data, epochs)
    for path in (
        table.write_csv(results, out / "digits.csv"),
        picture.write(results, data, out / "digits.png"),
    ):
        print(f"wrote {path}")
    print()
    for path in short(out, seed=seed):
        print(f"wrote {path}")
