"""SessionOptions: PopART's options, of which those that mean something here are acted on."""

from __future__ import annotations

__all__ = ["SessionOptions"]


class SessionOptions:
    """Options of an Ir's sessions. Any attribute can be set: those of PopART that are about
    compiling for an IPU, `enableEngineCaching` and `cachePath` among them, have nothing to act on.

    Acted on: `dotChecks`, `logDir`, and gpusim's own

    - `oneByOne`: run each op replica by replica, not on all replicas at once (default False); the
      results are the same.
    - `arrays`: "numpy" or "cupy" (on the GPU), by default "numpy".
    """

    #: Options that are dicts, whose entries programs set.
    DICTS = (
        "convolutionOptions",
        "engineOptions",
        "gclOptions",
        "lstmOptions",
        "matmulOptions",
        "reportOptions",
    )

    def __init__(self) -> None:
        self.dotChecks: set[str] = set()
        self.logDir = "."
        self.enableEngineCaching = False
        self.cachePath = "session_cache"
        self.oneByOne = False
        self.arrays = "numpy"
        for name in self.DICTS:
            setattr(self, name, {})

    def __repr__(self) -> str:
        set_ = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"SessionOptions({set_})"
