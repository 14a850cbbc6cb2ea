"""Functions that are called on the host, by names that an exported file can import, and one without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def shifted(x: Any) -> Any:
    return np.asarray(x) + 1.5


def shard_map(x: Any) -> Any:
    return np.asarray(x) - 1.5


def both(given: dict[str, Any], *, by: Any) -> tuple[Any, Any]:
    return np.asarray(given["x"]) * by, np.asarray(given["x"]) - by


def made(scale: float) -> Callable[[Any], Any]:
    return lambda x: np.asarray(x) * scale
