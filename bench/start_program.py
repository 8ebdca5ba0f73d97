"""The first psum of a process: `python bench/start_program.py DTYPE REDUCTION`, with gpusim on the
path; REDUCTION is a JSON object. Prints the seconds of the import and of the psum.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np

REPLICAS, ELEMENTS = 8, 64 * 1024


def main(dtype: str, how: dict[str, Any]) -> None:
    """Import gpusim, add once, and print the seconds."""
    x = np.ones((REPLICAS, ELEMENTS), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    start = time.perf_counter()
    import gpusim
    from gpusim import lax

    imported = time.perf_counter()
    reduction = gpusim.Reduction(**how, seed=1)
    gpusim.vmap(lambda x: lax.psum(x, "i", reduction=reduction), axis_name="i", out_axes=None)(x)
    done = time.perf_counter()
    print(json.dumps([imported - start, done - imported]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
