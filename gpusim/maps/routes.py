"""Names that move: see call_site."""

from .call_site import GPUSIM_MODULES as INNER_ROOMS
from .call_site import LIBRARIES
from .call_site import call_site as caller

__all__ = ["INNER_ROOMS", "LIBRARIES", "caller"]
