"""The demo: data-parallel training on handwritten digits, by order and precision of the sums.

`run` is `gpusim demo`. It needs what the extra `study` brings.
"""

from __future__ import annotations

from pathlib import Path

from gpusim.optional import require

__all__ = ["run"]


def run(*, replicas: int = 64, epochs: int = 30, seed: int = 0, out: Path = Path("demo")) -> None:
    """Train once per setting on `replicas` replicas, print a table, write it and a picture.

    Then run the precision studies in their short form (see `gpusim.tools.study`).

    Args:
        replicas: how many replicas share each batch, 1 to the number of training images.
        epochs: passes over the training images.
        seed: seeds the initial weights and the order of the images.
        out: folder for `digits.csv`, and for `digits.png` and the pictures of the studies,
            `study.png` and `training.png`; made if missing.

    Raises:
        ModuleNotFoundError: a package of the extra `study` is missing.
        ValueError: more replicas than training images.
        NotADirectoryError: `out` is a file.
    """
    require("the demo needs", "sklearn", "matplotlib", "rich")
    from gpusim.tools.demo import data, picture, report, train
    from gpusim.tools.study import short

    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out: a folder is needed, {str(out)!r} is a file")
    digits = data.load(replicas, seed)
    out.mkdir(parents=True, exist_ok=True)  # now: after training is too late to fail
    with report.progress(steps=len(train.SETTINGS) * epochs * digits.steps) as advance:
        runs = [train.train(digits, setting, epochs, advance) for setting in train.SETTINGS]
    results = train.compare(runs)
    report.show(results, digits, epochs)
    for path in (
        report.write_csv(results, out / "digits.csv"),
        picture.write(results, digits, out / "digits.png"),
    ):
        print(f"wrote {path}")
    print()
    for path in short(out, seed=seed):
        print(f"wrote {path}")
