"""Source lines of equations: the innermost line in the user's own files, and the model's name for the place."""

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
    """The place of an equation.

    Attributes:
        line: `file:line (function)`.
        scope: the named scopes around it, `encoder/layer_3`.
        function: the function that it calls, if it is a call.
        library: the library function that the line calls, of which it is a part, as `diagonal` of `jnp.diagonal`; "" if the line
            is in the user's function.
    """

    line: str = ""
    scope: str = ""
    function: str = ""
    library: str = ""


@lru_cache(maxsize=4096)
def owner(file: str) -> str:
    """Return the owner of a file: "jax", "unity", "library" or "user"."""
    path = os.path.realpath(file)
    if path.startswith(_JAX):
        return "jax"
    if path.startswith(_UNITY):
        return "unity"
    installed = path.startswith(_INSTALLED) or "site-packages" in path or "dist-packages" in path or file.startswith("<frozen")
    return "library" if installed else "user"


def place_of(info: Any, call: Place, function: str = "") -> Place:
    """Return the place of an equation, perhaps a call of `function`, inside of a call.

    JAX may have traced the called function for an earlier call, and recorded that one's caller. So frames beyond the function's own
    are replaced by the place of this call.
    """
    scope = "/".join(s for s in (call.scope, str(info.name_stack)) if s)
    own = _line_of(info.traceback, call.function)
    return Place(own or call.line, scope, function, "" if own else call.library or call.function.strip("_"))


def _line_of(traceback: Any, function: str) -> str:
    """Return the innermost line in the user's own files up to the frame of `function`, or else in a library's."""
    frames = traceback.frames if traceback is not None else []
    if function:
        own = next((k for k, f in enumerate(frames) if f.function_name.rpartition(".")[2] == function), -1)
        return _innermost(frames[: own + 1], ("user",))
    start = next((k for k, f in enumerate(frames) if owner(f.file_name) in ("user", "library")), 0)  # `unity.constrain` is before
    end = next((k for k, f in enumerate(frames) if k >= start and owner(f.file_name) == "unity"), len(frames))
    return _innermost(frames[:end], ("user",)) or _innermost(frames[:end], ("library",))


def _innermost(frames: list[Any], owners: tuple[str, ...]) -> str:
    frame = next((f for f in frames if owner(f.file_name) in owners), None)
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name})" if frame is not None else ""
