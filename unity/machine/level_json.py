"""Levels of network as the JSON data of a machine's file."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from unity.machine.hardware import Curve, Level, MachineError

_LEVEL_FIELDS = ("name", "size", "bandwidth", "latency")


def level_json(level: Level) -> dict[str, Any]:
    """Return a level's fields, its measurements only if it has any."""
    data: dict[str, Any] = {name: getattr(level, name) for name in _LEVEL_FIELDS}
    if level.relative:
        data["relative"] = level.relative
    if level.curves:
        data["curves"] = [asdict(curve) for curve in level.curves]
    return data


def level_of(data: Any, where: str) -> Level:
    """Read what `level_json` returned. Raises MachineError, which names the place `where` in the file."""
    level = Level(*fields(data, where, _LEVEL_FIELDS))
    relative, curves = data.get("relative", ()), data.get("curves", ())
    try:
        level = replace(level, relative=tuple((str(kind), alpha, beta) for kind, alpha, beta in relative))
    except (TypeError, ValueError) as error:
        raise MachineError(f"{where}.relative must list (collective, times, times), got {relative!r}") from error
    if not isinstance(curves, list | tuple):
        raise MachineError(f"{where}.curves must be a list, got {type(curves).__name__}")
    return replace(level, curves=tuple(_curve_of(curve, f"{where}.curves[{k}]") for k, curve in enumerate(curves)))


def _curve_of(data: Any, where: str) -> Curve:
    kind, size, alpha, beta = fields(data, where, ("kind", "size", "alpha", "beta"))
    try:
        points = tuple((nbytes, seconds) for nbytes, seconds in data.get("points", ()))
    except (TypeError, ValueError) as error:
        raise MachineError(f"{where}.points must list (bytes, seconds)") from error
    turned = data.get("turned", False)
    if not isinstance(turned, bool):
        raise MachineError(f"{where}.turned must be true or false, got {turned!r}")
    return Curve(kind, size, alpha, beta, data.get("error", 0.0), points, turned)


def fields(data: Any, where: str, names: tuple[str, ...]) -> list[Any]:
    """An object's fields of these names. Raises MachineError where one is missing."""
    if not isinstance(data, dict):
        raise MachineError(f"{where} must be an object with {', '.join(names)}, got {type(data).__name__}")
    missing = [name for name in names if name not in data]
    if missing:
        raise MachineError(f"{where} lacks {', '.join(missing)}")
    return [data[name] for name in names]
