"""Options.TensorLocations: where on an IPU tensors lie. Kept, and without effect here."""

from __future__ import annotations

from typing import Self

from gpusim.poptorch.options.base import OptionsDict

__all__ = ["TensorLocationSettings", "_TensorLocationOptions"]

IO_TILES = "numIOTiles must be an even number between 32 and 192."


class TensorLocationSettings(OptionsDict):
    """Where tensors of a kind lie.

    All methods return the settings, and raise AssertionError for a value of another type.

    >>> TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(4).toDict()
    {'onChip': 0, 'minElementsForOffChip': 4}
    """

    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Smaller tensors stay on the chip."""
        assert isinstance(min_elements, int)
        self.createOrSet(minElementsForOffChip=min_elements)
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Smaller tensors are not spread over the replicas."""
        assert isinstance(min_elements, int)
        self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)
        return self

    def useOnChipStorage(self, use: bool | None = True) -> Self:
        """On the chip or off it; None leaves it open."""
        if use is None:
            self.deleteIfExists("onChip")
        else:
            assert isinstance(use, bool)
            self.createOrSet(onChip=int(use))
        return self

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Whether each replica holds a part."""
        assert isinstance(use, bool)
        self.createOrSet(useReplicatedTensorSharding=int(use))
        return self

    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Whether I/O tiles load them."""
        assert isinstance(use, bool)
        self.createOrSet(useIOTilesToLoad=int(use))
        return self

    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Whether I/O tiles store them."""
        assert isinstance(use, bool)
        self.createOrSet(useIOTilesToStore=int(use))
        return self


class _TensorLocationOptions(OptionsDict):
    """Reached as `Options().TensorLocations`."""

    def numIOTiles(self, num_tiles: int) -> Self:
        """How many tiles are for I/O alone: an even number from 32 to 192, else AssertionError."""
        assert isinstance(num_tiles, int)
        assert 32 <= num_tiles <= 192 and num_tiles % 2 == 0, IO_TILES
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Where activations lie."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Where weights lie."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Where the optimizer's state lies."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Where gradients accumulate."""
        return self._locate("location_accumulator", location)

    def _locate(self, option: str, location: TensorLocationSettings) -> Self:
        assert isinstance(location, TensorLocationSettings)
        self.createOrSet(**{option: location.toDict()})
        return self
