"""A Python that has what gpusim depends on, and none of its extras.

The packages are those of this Python, linked, so that nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["bare_python"]

ROOT = Path(__file__).parents[2]
DEPENDENCIES = ("numpy", "ml_dtypes", "optree", "filelock", "typing_extensions")
"""The packages of pyproject.toml's `dependencies`, and those that they import."""


def bare_python(folder: Path) -> Path:
    """Make an environment in `folder` whose Python imports gpusim from the checkout.

    **Returns**: the interpreter.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = Path(sysconfig.get_path("purelib"))
    (target,) = folder.glob("lib/python*/site-packages")
    for name in DEPENDENCIES:
        found = [*own.glob(f"{name}.py"), *own.glob(name), *own.glob(f"{name}-*.dist-info")]
        assert found, f"{name} is not in {own}"
        libraries = own.glob(f"{name}.libs")
        for path in [*found, *libraries]:
            (target / path.name).symlink_to(path)
    (target / "gpusim.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"
