"""Which of an optimizer's attributes may change after compilation."""

from __future__ import annotations

__all__ = ["VariableAttributes"]


class VariableAttributes:
    """The attributes that are variable; all others are constant. `optimizer.variable_attrs` is one.

    **Arguments**

    - `variable_attributes`: names of those that are variable.
    - `allowed_attributes`: names of all that can be marked.

    >>> attributes = VariableAttributes(["lr"], ["lr", "momentum"])
    >>> attributes.isConstant("momentum")
    True
    >>> attributes.markAsVariable("momentum")
    >>> attributes.isConstant("momentum")
    False
    """

    def __init__(self, variable_attributes: list[str], allowed_attributes: list[str]) -> None:
        self._variable_attributes = variable_attributes
        self._allowed_attributes = allowed_attributes

    def isConstant(self, attr: str) -> bool:
        """Whether the attribute keeps the value that it is compiled with."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Make it constant. AssertionError for a name that is not allowed."""
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Make it variable. AssertionError for a name that is not allowed."""
        self._check(attr)
        self._variable_attributes.append(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed_attributes, (
            f"Unknown attribute {attr}, allowed values: {self._allowed_attributes}"
        )
