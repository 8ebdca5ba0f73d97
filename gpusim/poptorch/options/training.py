"""Options.Training: gradient accumulation and reduction."""

from __future__ import annotations

from typing import Self

from gpusim.poptorch.enums import MeanReductionStrategy, ReductionType
from gpusim.poptorch.options.base import OptionsDict, check_count
from gpusim.poptorch.options.popart import _PopartOptions

__all__ = ["_TrainingOptions"]

MEAN, SUM = ReductionType.Mean, ReductionType.Sum


class _TrainingOptions(OptionsDict):
    """The group `Options().Training`, which inference ignores."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Set the number of micro-batches whose gradients an update adds up, on each replica.

        AssertionError for other types than int, ValueError below 1.
        """
        check_count(gradient_accumulation=gradient_accumulation)
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Choose the gradients' mean over micro-batches and replicas, or their sum.

        ValueError for anything but `ReductionType.Mean` and `ReductionType.Sum`.
        """
        # by identity: a plain number equals a member
        if not any(reduction_type is allowed for allowed in (MEAN, SUM)):
            raise ValueError(
                "accumulationAndReplicationReductionType must be set to "
                "poptorch.ReductionType.Mean or poptorch.ReductionType.Sum"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """Set when a mean divides; `Post` by default, `Running` for accumulation in float16."""
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Choose whether to scale the loss up and down, so that float16 gradients fit."""
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Choose whether convolutions start on different tiles; without effect here."""
        self._popart_options.merge("convolutionOptions", {"enableConvDithering": enabled})
        return self
