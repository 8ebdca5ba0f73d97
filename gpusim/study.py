"""Precision studies: what a reduction does to its result, by order, format, rounding and replicas.

`sweep` measures sums of any input against the exact ones; `train` trains a small network in narrow
formats. Both are `gpusim study` on the command line; `short` runs a short form of both.
"""

from gpusim.tools.study.results import Measurement, PairedTest, Row, Study
from gpusim.tools.study.settings import Setting
from gpusim.tools.study.short_study import short
from gpusim.tools.study.sweeping import ArtefactWarning, sweep
from gpusim.tools.study.traffic import bytes_sent
from gpusim.tools.study.training import Training, TrainingInterrupted, train

__all__ = [
    "ArtefactWarning",
    "Measurement",
    "PairedTest",
    "Row",
    "Setting",
    "Study",
    "Training",
    "TrainingInterrupted",
    "bytes_sent",
    "short",
    "sweep",
    "train",
]
