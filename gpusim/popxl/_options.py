"""SessionOptions: PopART's options."""

from __future__ import annotations

__all__ = ["SessionOptions"]


class SessionOptions:
    """Options of an Ir's sessions. Any attribute can be set.

    Options of PopART that are about compiling for an IPU, such as `enableEngineCaching` and
    `cachePath`, have no effect.

    Options with an effect are `dotChecks`, `logDir`, `throwIfLog2ScaleTensorNotInRange` (whether a
    run raises poplar_application_runtime_error for a scale outside -32 to 31, default True), and
    gpusim's own

    - `oneByOne`: run each op replica by replica, not on all replicas at once (default False). The
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
        self.throwIfLog2ScaleTensorNotInRange = True
        self.oneByOne = False
        self.arrays = "numpy"
        for name in self.DICTS:
            setattr(self, name, {})

    def __repr__(self) -> str:
        set_ = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"SessionOptions({set_})"
