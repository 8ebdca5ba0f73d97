"""The tracer in a real process of torchrun's, for comparing gpusim's verdict with gloo's.

    torchrun --nproc-per-node 4 -m gpusim.tools.equal.recording SETTINGS train.py ...

SETTINGS are those of `settings.Settings`, as JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from .settings import Settings
from .tracing import traced

__all__ = ["main"]


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    with traced(settings, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # PyTorch's gloo may hang or abort where Python drops its groups


if __name__ == "__main__":
    main()
