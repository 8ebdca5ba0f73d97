"""Measured times of inputs and outputs, and an estimate of cycles.

Each input has a time for every micro-batch of a call, each output for every one that is returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

__all__ = ["CLOCK", "EVENTS", "Counters", "Latency"]

#: Cycles a second of the simulated IPU: the clock of a Mk2.
CLOCK = 1_330_000_000
EVENTS = ("input", "input_complete", "output", "output_complete")

Latency = tuple[float, float, float]
Times = list[list[float]]


class Counters:
    """The times of one call.

    **Arguments**

    - `replicas`: the number of micro-batches of a step; their tensors go together.
    - `enabled`: False notes tensors without times: synthetic data is not copied.
    """

    def __init__(self, replicas: int = 1, enabled: bool = True) -> None:
        self._enabled, self._replicas = enabled, replicas
        self._times: dict[str, Times] = {event: [] for event in EVENTS}
        self.device_seconds = 0.0  #: the time that the device has worked

    def note(self, event: str, tensors: int) -> None:
        """Note that the event happens now, to all tensors of a step, or to none."""
        times, now = self._times[event], time.perf_counter()
        times += [[] for _ in range(tensors - len(times))]
        if self._enabled and tensors:
            for one in times:
                one += [now] * self._replicas

    def as_dict(self) -> dict[str, Times]:
        """Lists by event, one for each tensor; one empty list without tensors."""
        return {event: [list(one) for one in times] or [[]] for event, times in self._times.items()}

    # ---------------------------------------------------------------- latencies

    def host_to_device(self) -> Latency:
        return self._latency("input", min, "input_complete", max)

    def compute(self) -> Latency:
        return self._latency("input_complete", max, "output", max)

    def device_to_host(self) -> Latency:
        return self._latency("output", min, "output_complete", max)

    def round_trip(self) -> Latency:
        return self._latency("input", min, "output_complete", max)

    def _latency(
        self,
        begin: str,
        first: Callable[[Sequence[float]], float],
        end: str,
        last: Callable[[Sequence[float]], float],
    ) -> Latency:
        """Minimum, maximum and mean over the steps after which something was returned.

        Of the steps since the one before it, the first one's beginning counts.
        """
        begins = self._steps(begin, first)
        ends = self._steps(end, last)
        if not begins or not ends:
            return (0.0, 0.0, 0.0)
        each = len(begins) // len(ends)
        durations = [end - begins[place * each] for place, end in enumerate(ends)]
        return min(durations), max(durations), sum(durations) / len(durations)

    def _steps(self, event: str, reduce: Callable[[Sequence[float]], float]) -> list[float]:
        """One time for each step: all replicas' are the same."""
        times = [one[:: self._replicas] for one in self._times[event]]
        return [reduce(step) for step in zip(*times, strict=True)]

    # ---------------------------------------------------------------- cycles

    def cycles(self) -> int:
        """The cycles of an IPU that takes as long as this device has."""
        return round(self.device_seconds * CLOCK)
