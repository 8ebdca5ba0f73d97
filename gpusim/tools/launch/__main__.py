"""`python -m gpusim.tools.launch` is `poprun`, for a source tree that was never installed."""

from __future__ import annotations

import sys

from gpusim.tools.launch import main

if __name__ == "__main__":
    sys.exit(main())
