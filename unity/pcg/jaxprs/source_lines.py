"""Where the user wrote an equation: the innermost line of the user's own files behind it, and the model's name for the place."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from unity.base.installation import PACKAGE

_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(k)) + os.sep for k in ("stdlib", "platstdlib", "purelib", "platlib")})
_JAX = os.path.dirname(os.path.realpath(jax.__file__)) + os.sep
_UNITY = str(PACKAGE) + os.sep


@dataclass(frozen=True)
class Place:
    """A line, `file:line (function)`; the named scopes around it, `encoder/layer_3`; and the function that a call enters."""

    line: str = ""
    scope: str = ""
    function: str = ""


@lru_cache(maxsize=4096)
def owner(file: str) -> str:
    """Whose code a file is: "jax", "unity", "library" or "user"."""
    path = os.path.realpath(file)
    if path.startswith(_JAX):
        return "jax"
    if path.startswith(_UNITY):
        return "unity"
    installed = path.startswith(_INSTALLED) or "site-packages" in path or "dist-packages" in path or file.startswith("<frozen")
    return "library" if installed else "user"


def place_of(info: Any, call: Place, function: str = "") -> Place:
    """The place of an equation (itself a call of `function`, perhaps) inside a call.

    A called function's program may have been traced for an earlier call and remember that one's caller: beyond the function's
    own frame, the place of this call is what counts.
    """
    scope = "/".join(s for s in (call.scope, str(info.name_stack)) if s)
    return Place(_line_of(info.traceback, call.function) or call.line, scope, function)


def _line_of(traceback: Any, function: str) -> str:
    """The innermost line of the user's own files up to the frame of `function`; failing that, of a library's."""
    frames = traceback.frames if traceback is not None else []
    if function:
        own = next((k for k, f in enumerate(frames) if f.function_name.rpartition(".")[2] == function), -1)
        return _innermost(frames[: own + 1], ("user",))
    start = next((k for k, f in enumerate(frames) if owner(f.file_name) in ("user", "library")), 0)  # `unity.constrain` is before
    end = next((k for k, f in enumerate(frames) if k >= start and owner(f.file_name) == "unity"), len(frames))
    return _innermost(frames[:end], ("user",)) or _innermost(frames[:end], ("library",))


def _innermost(frames: list[Any], owners: tuple[str, ...]) -> str:
    found = next((f for f in frames if owner(f.file_name) in owners), None)
    return f"{found.file_name}:{found.line_num} ({found.function_name})" if found is not None else ""
