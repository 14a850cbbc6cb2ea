"""Methods that compute their result once for each tuple of arguments, and keep it with their object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def remembered(*errors: type[Exception]) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator of methods of immutable objects: results, and these errors, are kept as long as the object lives.

    As `functools.cached_property` does for properties; `functools.cache` would keep all objects alive. Arguments must be hashable.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name = f"_{method.__name__}_of"

        @wraps(method)
        def remembering(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            results: dict[Any, tuple[R | None, Exception | None]] = vars(self).setdefault(name, {})
            key = (args, tuple(kwargs.items()))
            if key not in results:
                try:
                    results[key] = method(self, *args, **kwargs), None
                except errors as error:
                    results[key] = None, error
            result, error = results[key]
            if error is not None:
                raise type(error)(*error.args)
            return result  # pyright: ignore[reportReturnType]

        return remembering

    return decorate
