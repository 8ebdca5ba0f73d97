"""Attributes of the operations of a block; without effect here."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

__all__ = ["Attribute"]

Attributes = Mapping[str, Mapping[str, Any]]
_current: ContextVar[Attributes] = ContextVar("attributes")


class Attribute:
    """Gives operations attributes: each keyword is an attribute, with a dictionary of its keys.

    >>> with Attribute(__outline={"layer": "embedding"}), Attribute(__outline={"part": "a"}):
    ...     Attribute.current()
    {'__outline': {'layer': 'embedding', 'part': 'a'}}
    >>> Attribute.current()
    {}
    """

    def __init__(self, **kwargs: Mapping[str, Any]) -> None:
        self._kwargs = kwargs
        self._entered: list[Token[Attributes]] = []  # one may be entered inside itself

    @staticmethod
    def current() -> dict[str, dict[str, Any]]:
        """The attributes of the operations of the current block."""
        return {name: dict(keys) for name, keys in _current.get({}).items()}

    def __enter__(self) -> None:
        attributes = self.current()
        for name, keys in self._kwargs.items():
            attributes[name] = {**attributes.get(name, {}), **keys}
        self._entered.append(_current.set(attributes))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._entered.pop())
