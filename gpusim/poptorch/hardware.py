"""Availability of IPUs: simulated ones count as hardware, the IPU Model does not.

POPTORCH_IPU_MODEL=1 asks for the model instead, as for PopTorch.
"""

from __future__ import annotations

import os

from gpusim.devices import Table
from gpusim.devices.attributes import IPU_VERSION
from gpusim.poptorch._logging import logger
from gpusim.poptorch.options import Options

__all__ = ["ipuHardwareIsAvailable", "ipuHardwareVersion", "usesIpuModel"]

MODEL_VARIABLES = {
    "POPTORCH_IPU_MODEL": "Ipu model",
    "POPTORCH_SMALL_IPU_MODEL": "small Ipu model",
}


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether some device has `num_ipus` simulated IPUs, free or not.

    GPUSIM_IPUS says how many IPUs there are; devices are single IPUs and groups of 2, 4, 8, ...
    Under POPTORCH_IPU_MODEL=1 the result is False.

    ValueError for invalid values of these variables.

    >>> ipuHardwareIsAvailable(), ipuHardwareIsAvailable(3)
    (True, False)
    """
    return not model_in_environment() and bool(Table.from_environment().of_size(num_ipus))


def ipuHardwareVersion() -> int:
    """The generation of the simulated IPUs: 21, the one with 8-bit floating-point formats.

    AssertionError under POPTORCH_IPU_MODEL=1, without hardware.

    >>> ipuHardwareVersion()
    21
    """
    assert ipuHardwareIsAvailable(), "No IPU hardware available on this system"
    return IPU_VERSION


def usesIpuModel(options: Options) -> bool:
    """Whether the options, or without a choice there the environment, ask for the IPU Model."""
    if options.exists("use_model"):
        asked = bool(options.use_model)
        logger.info("From the user configuration: Ipu model: %s", shown(asked))
        return asked
    return model_in_environment()


def model_in_environment() -> bool:
    """Whether one of the two variables is set to a number other than 0."""
    found = False
    for variable, name in MODEL_VARIABLES.items():
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                enabled = int(text) != 0
            except ValueError:
                raise ValueError(f"{variable}={text!r}: expected 0 or 1") from None
            logger.info("From %s environment variable: %s: %s", variable, name, shown(enabled))
            found = found or enabled
    return found


def shown(enabled: bool) -> str:
    return "Enabled" if enabled else "Disabled"
