"""Methods whose results are cached on their object, for each tuple of arguments."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def cached_method(*errors: type[Exception]) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator that caches a method's results, and exceptions of these types, on the object.

    It is `functools.cached_property` with arguments, which must be hashable; `functools.cache` would keep every object alive. The
    object needs a `__dict__`. Of an exception neither the traceback nor the context is kept, which refer to the object.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name = f"results of {method.__qualname__}"

        @wraps(method)
        def cached(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            results: dict[Any, tuple[R | None, Exception | None]] = vars(self).setdefault(name, {})
            key = (args, tuple(kwargs.items()))
            if key not in results:
                try:
                    results[key] = method(self, *args, **kwargs), None
                except errors as error:
                    results[key] = None, copy(error)
                    raise
            result, refusal = results[key]
            if refusal is not None:
                raise copy(refusal)
            return result  # pyright: ignore[reportReturnType]

        return cached

    return decorate
