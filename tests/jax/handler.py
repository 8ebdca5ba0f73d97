"""Checks of JAX's handler, which `child` runs in a process of their own."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from jax import lax

import gpusim.jax
from gpusim.jax.lowering import board
from gpusim.jax.rendezvous import INTERVAL, Site
from tests.jax.devices import DEVICES, mapped


def settling_waits_for_what_is_computed() -> None:
    """A record would lack a call whose results are dropped."""
    x = np.ones((DEVICES, 2), np.float32)
    begun, done = threading.Event(), threading.Event()
    compute = Site.compute

    def slow_compute(self: Site, *args: Any) -> None:
        begun.set()
        time.sleep(3 * INTERVAL)
        compute(self, *args)
        done.set()

    with gpusim.jax.installed("linear"):
        program = mapped(lambda x: lax.psum(x, "i"))
        program(x)[0].block_until_ready()
        Site.compute = slow_compute
        try:
            program(x)
            begun.wait()
            board().settle()
            assert done.is_set()
        finally:
            Site.compute = compute
