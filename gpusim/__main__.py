"""`python -m gpusim` is the command `gpusim`."""

from __future__ import annotations

import sys

from gpusim.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
