"""Checks of a server's parts, so that a wrong part is reported where it is given and not while the server runs."""

from __future__ import annotations

from asyncflow.errors import a_kind, brief


def check_kind(value: object, kind: type, name: str) -> None:
    """Raises TypeError unless `value` is of a kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is made for {a_kind(kind)}; got {type(value).__name__} {brief(value)}")


def check_count(value: object, name: str) -> None:
    """Raises ValueError unless `value` is an integer, 0 or more."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is an integer, 0 or more; got {brief(value)}")
