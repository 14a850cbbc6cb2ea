"""Seconds of an operator on one device, from the best available source.

- *measured*: this program was measured on these local shapes, with gradients of these operands.
- *interpolated*: this program was measured on other local shapes. The ratio of measured seconds to the roofline's is interpolated
  between the nearest measurements, by their distance in the logarithms of FLOPs and bytes.
- *calibrated*: other programs of this kind were measured. One ratio is used for every magnitude of the roofline's seconds; if no
  program of the kind was measured, the ratio is that of all products, or of all other operators. Conditionals calibrate nothing:
  their branches have operators of all kinds, which `operator_seconds` prices one by one.
- *roofline*: nothing was measured.

Operators without a measurement are scaled by such ratios because nothing reaches the bare roofline: a search would otherwise
avoid all that was measured in favour of all that was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, hypot, log, log2
from statistics import median

from unity.machine.hardware import Device
from unity.machine.profiles.profile import Measurement, Profile, Shapes
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import BRANCHED
from unity.search.cost.alignment import PRODUCT, depends_on_alignment, slowdown_of_shapes
from unity.search.cost.branch_operators import has_conditional
from unity.search.cost.roofline import dense_work, roofline

MEASURED, INTERPOLATED, CALIBRATED, ROOFLINE = "measured", "interpolated", "calibrated", "roofline"
NEIGHBOURS = 4  # measurements in an interpolation
LEAST = 1e-9  # seconds: the lower bound of a measurement, so that its ratio to the roofline is positive
PRODUCTS, OTHERS = "products", "others"  # the kinds to fall back on


@dataclass(frozen=True)
class Seconds:
    """An operator's seconds on one device, forward and backward, and their source."""

    forward: float
    backward: float
    how: str


@dataclass(frozen=True)
class Piece:
    """One device's part of an operator: its local shapes, FLOPs, bytes read or written, and bytes of gradients that are zeroed."""

    shapes: Shapes
    work: float
    nbytes: float
    zeroed: float = 0.0


@lru_cache(maxsize=65536)
def kind_of(body: Body) -> str:
    """Return the kind that a body is calibrated with: its set of primitives, and conditionals that are nested in them."""
    return " ".join(sorted({*body.primitives, *(BRANCHED if has_conditional(body) else ())}))


def lookup(profile: Profile, device: Device, body: Body, piece: Piece, differentiated: tuple[bool, ...]) -> Seconds:
    """Return the seconds of a run of an operator on a piece.

    Args:
        profile: The measurements.
        device: The device that they were taken on.
        body: The operator's program.
        piece: One device's part of it.
        differentiated: For each operand, whether it has a gradient.
    """
    measurement = profile.exact.get((body.key, piece.shapes, differentiated))
    if measurement is not None:
        return Seconds(measurement.forward, measurement.backward, MEASURED)
    dtype, count = dense_work(body)[1], sum(differentiated)
    slower = slowdown_of_shapes(device, dtype, piece.shapes, body) if depends_on_alignment(device, body) else (1.0, 1.0)
    forward, backward = roofline(device, piece.work, dtype, piece.nbytes, count, bool(body.equations), slower, piece.zeroed)
    plain = float(forward), float(backward)
    neighbours = profile.alike.get((body.key, differentiated))
    if neighbours:
        ratios = _interpolated_ratios(device, neighbours, piece, body)
        return Seconds(plain[0] * ratios[0], plain[1] * ratios[1], INTERPOLATED)
    calibrations = calibration(profile, device)
    table = calibrations.get(kind_of(body)) or calibrations.get(PRODUCTS if piece.work else OTHERS)
    if table is None or not body.equations:
        return Seconds(*plain, ROOFLINE)
    forward, backward = _nearest_ratio(table.forward, plain[0]), _nearest_ratio(table.backward, plain[1])
    return Seconds(plain[0] * forward, plain[1] * backward, CALIBRATED)


def _plain(m: Measurement, device: Device, body: Body | None = None) -> tuple[float, float]:
    """Return the roofline's seconds of a measured operator, forward and backward; `body` is its program, if it is known."""
    slower = slowdown_of_shapes(device, m.dtype, m.shapes, body) if m.kind == PRODUCT else (1.0, 1.0)
    forward, backward = roofline(device, m.work, m.dtype, m.nbytes, m.count, slowdown=slower, zeroed=m.zeroed)
    return float(forward), float(backward)


def _ratios(m: Measurement, device: Device, body: Body | None = None) -> tuple[float, float]:
    """Return the ratios of a measurement's seconds to the roofline's, forward and backward."""
    forward, backward = _plain(m, device, body)
    return max(m.forward, LEAST) / forward, max(m.backward, LEAST) / backward if m.count else 1.0


def _interpolated_ratios(device: Device, neighbours: Sequence[Measurement], piece: Piece, body: Body) -> tuple[float, float]:
    """Return the geometric mean of the nearest measurements' ratios, weighted by inverse distance."""
    position = log2(1 + piece.work), log2(1 + piece.nbytes)
    distances = [hypot(log2(1 + m.work) - position[0], log2(1 + m.nbytes) - position[1]) for m in neighbours]
    nearest = sorted(range(len(neighbours)), key=lambda k: (distances[k], k))[:NEIGHBOURS]
    if distances[nearest[0]] == 0:  # other shapes of the same size
        nearest = [k for k in nearest if distances[k] == 0]
    weights = [1 / distances[k] if distances[k] else 1.0 for k in nearest]
    ratios = [_ratios(neighbours[k], device, body) for k in nearest]
    means = (sum(w * log(r[direction]) for w, r in zip(weights, ratios, strict=True)) / sum(weights) for direction in (0, 1))
    forward, backward = map(exp, means)
    return forward, backward


@dataclass(frozen=True)
class Calibration:
    """Ratios of a kind's measured seconds to the roofline's, by magnitude: the power of four of the roofline's seconds."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]


def _nearest_ratio(table: Mapping[int, float], seconds: float) -> float:
    """Return the ratio of the nearest magnitude in a table; 1 if the table is empty."""
    if not table or seconds <= 0:
        return 1.0
    magnitude = _magnitude(seconds)
    return table[min(table, key=lambda k: (abs(k - magnitude), k))]


def _magnitude(seconds: float) -> int:
    return round(log2(max(seconds, LEAST)) / 2)


@lru_cache(maxsize=64)
def calibration(profile: Profile, device: Device) -> Mapping[str, Calibration]:
    """Return every kind's ratios on a device: the median of the measurements of each magnitude."""
    logarithms: dict[str, tuple[dict[int, list[float]], dict[int, list[float]]]] = {}
    for m in profile.measurements:
        if any(name in BRANCHED for name in m.kind.split()):
            continue
        plain = _plain(m, device)
        ratios = _ratios(m, device)
        for kind in (m.kind, PRODUCTS if m.work else OTHERS):
            for table, seconds, ratio in zip(logarithms.setdefault(kind, ({}, {})), plain, ratios, strict=True):
                if seconds > 0:  # a measurement without gradients has no backward seconds
                    table.setdefault(_magnitude(seconds), []).append(log(ratio))
    return {kind: Calibration(_medians(forward), _medians(backward)) for kind, (forward, backward) in logarithms.items()}


def _medians(logarithms: Mapping[int, Sequence[float]]) -> Mapping[int, float]:
    return {magnitude: exp(median(logs)) for magnitude, logs in logarithms.items()}
