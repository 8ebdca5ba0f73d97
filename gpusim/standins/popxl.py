"""`import popxl`, where gpusim.aliases has not been imported yet."""

from __future__ import annotations

import gpusim.aliases

gpusim.aliases.stand_in(__name__)
