"""A group of options: named values that keep their type, and that can be frozen."""

from __future__ import annotations

import copy
from typing import Any, Self

from gpusim.poptorch._logging import logger

__all__ = ["OptionsDict", "check_count", "items"]

FROZEN = "Can't modify frozen Options"


class OptionsDict:
    """Options by name, as attributes; existing ones can be set, to values of the same type.

    **Raises**:

    - AssertionError: for another name or type.
    - AttributeError: once the group is frozen.

    >>> options = OptionsDict(device_iterations=1)
    >>> options.device_iterations = 3
    >>> options("device_iterations"), options.toDict()
    (3, {'device_iterations': 3})
    >>> options.set(device_iterations="many")
    Traceback (most recent call last):
    ...
    AssertionError: Unexpected type <class 'str'> for option device_iterations. Expected ...
    """

    _values: dict[str, Any]

    def __init__(self, **default_values: Any) -> None:
        self._warnings: dict[str, str] = {}  # logged when the options are used, by name
        self._warnings_disabled: set[str] = set()
        self._is_frozen = False
        self._values = default_values  # the last private attribute: no more can be added

    # ---------------------------------------------------------------- values

    def set(self, **kwargs: Any) -> None:
        """Change options that exist."""
        self.checkIsFrozen()
        for option, value in kwargs.items():
            assert self.exists(option), (
                f"Invalid option {option}, valid options are {self._values.keys()}"
            )
            expected = type(self._values[option])
            assert isinstance(value, expected), (
                f"Unexpected type {type(value)} for option {option}. Expected {expected}"
            )
            self._values[option] = value

    def createOrSet(self, **kwargs: Any) -> None:
        """Change options, or add them."""
        self.checkIsFrozen()
        for option, value in kwargs.items():
            if self.exists(option):
                self.set(**{option: value})
            else:
                self._values[option] = value

    def exists(self, option: str) -> bool:
        """Whether an option has a value."""
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Remove an option if it exists."""
        self.checkIsFrozen()
        self._values.pop(option, None)

    def __call__(self, option: str) -> Any:
        # numIOTiles and some others are options and methods
        return self._values[option] if self.exists(option) else getattr(self, option)

    def __getattr__(self, option: str) -> Any:
        # only for missing attributes; a copy that is being made lacks `_values`
        values = self.__dict__.get("_values", {})
        if option not in values:
            raise AttributeError(f"Invalid attribute {option:.1000}.")
        return values[option]

    def __setattr__(self, option: str, value: Any) -> None:
        self.checkIsFrozen(option)
        if not option.startswith("_"):
            self.set(**{option: value})
            return
        known = option in self.__dict__ or option == "__class__"
        if "_values" in self.__dict__ and not known:
            raise AttributeError(
                f"Invalid private attribute {option}. Valid attributes: {list(self.__dict__)}"
            )
        super().__setattr__(option, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    # ---------------------------------------------------------------- freezing

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Raise AttributeError if these options were passed to an executor or a DataLoader."""
        if option != "_is_frozen" and self.__dict__.get("_is_frozen", False):
            raise AttributeError(FROZEN)

    def _changeFreezeState(self, new_state: bool) -> None:
        self._is_frozen = new_state
        for group in self.__dict__.values():
            if hasattr(group, "_is_frozen"):
                group._is_frozen = new_state

    def _freeze(self) -> None:
        self._changeFreezeState(True)

    def _unfreeze(self) -> None:
        self._changeFreezeState(False)

    def __deepcopy__(self, memory: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memory[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memory)
        copied._is_frozen = False
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # ---------------------------------------------------------------- as a whole

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """Add these options to a dictionary without any of them, and return it."""
        for option, warning in self._warnings.items():
            if option not in self._warnings_disabled:
                logger.warning(warning)
        assert not self._values.keys() & other.keys(), (
            "Can't merge dictionaries, they have some keys in common"
        )
        other.update(self._values)
        return other

    def toDict(self) -> dict[str, Any]:
        """The options by name."""
        return self.update({})

    def _state(self) -> dict[str, Any]:
        """Everything that equality compares: all but whether the group is frozen."""
        return {name: value for name, value in self.__dict__.items() if name != "_is_frozen"}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._state() == other._state()

    def __hash__(self) -> int:
        # Equal groups have equal hashes, and setting an option may not change the hash.
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({items(self._values)})"


def items(values: dict[str, Any]) -> str:
    """`a=1, b='x'`"""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def check_count(**given: int) -> None:
    """Raise ValueError for a number below 1. Other types are left to the options' own check.

    >>> check_count(device_iterations=0)
    Traceback (most recent call last):
    ...
    ValueError: device_iterations=0: expected a number of at least 1
    """
    for name, value in given.items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name}={value!r}: expected a number of at least 1")
