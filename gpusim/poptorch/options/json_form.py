"""Options from a JSON object: {"Training.gradientAccumulation": 4}. Sets options, and no more."""

from __future__ import annotations

import enum
import json
from typing import Any

from gpusim.poptorch import enums
from gpusim.poptorch.options.reachable import method_of

__all__ = ["load"]


def load(options: Any, text: str) -> None:
    """Call the methods that the object names."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object of options, got {text[:80]!r}")
    for name, value in found.items():
        target = options
        *groups, method = name.split(".")
        for group in groups:
            target = method_of(target, group, options)
        arguments = value if isinstance(value, list) else [value]
        call = method_of(target, method, options)
        if not callable(call):
            raise AttributeError(f"{name!r} is no method of the options")
        call(*map(converted, arguments))


def converted(value: Any) -> Any:
    """A member of an enumeration for its name, also inside lists and dictionaries.

    >>> converted(["ConnectionType.OnDemand", "a.b"])
    [<ConnectionType.OnDemand: 1>, 'a.b']
    """
    if isinstance(value, list):
        return [converted(element) for element in value]
    if isinstance(value, dict):
        return {key: converted(element) for key, element in value.items()}
    if isinstance(value, str):
        name, dot, member = value.removeprefix("poptorch.").partition(".")
        kind = getattr(enums, name, None) if dot and name in enums.__all__ else None
        if isinstance(kind, enum.EnumMeta):
            if member not in kind.__members__:
                raise ValueError(f"{value!r}: expected one of {', '.join(kind.__members__)}")
            return kind[member]
    return value
