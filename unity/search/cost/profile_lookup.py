"""What an operator takes on one device, by the best that is known of it, and how that is known.

- *measured*: this program, on these local shapes, with gradients to these operands.
- *interpolated*: this program on other local shapes. What is interpolated is how many times as long as the roofline says it
  takes, between the nearest measurements, by their distance in FLOPs and bytes, both in powers of two.
- *calibrated*: other programs of this kind. The same, as one figure for every size of the roofline's seconds; where the kind is
  not known either, of all products, or of everything else.
- *roofline*: nothing was measured.

Whatever was not measured is brought to the level of what was: if it kept the bare roofline's seconds, which nothing reaches, a
search would flee from all that was measured to all that was not.
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
from unity.search.cost.roofline import dense_work, roofline

MEASURED, INTERPOLATED, CALIBRATED, ROOFLINE = "measured", "interpolated", "calibrated", "roofline"
NEIGHBOURS = 4  # measurements that are interpolated between
LEAST = 1e-9  # seconds: what took no time, compared with the roofline
PRODUCTS, OTHERS = "products", "others"  # kinds of last resort


@dataclass(frozen=True)
class Seconds:
    """An operator's seconds on one device, forward and backward, and how they are known."""

    forward: float
    backward: float
    how: str


@dataclass(frozen=True)
class Piece:
    """What one device has of an operator: its local shapes, FLOPs, and bytes of operands and results."""

    shapes: Shapes
    work: float
    nbytes: float


@lru_cache(maxsize=65536)
def kind_of(body: Body) -> str:
    """What is measured alike: bodies of the same primitives."""
    return " ".join(sorted(set(body.primitives)))


def lookup(profile: Profile, device: Device, body: Body, piece: Piece, differentiated: tuple[bool, ...]) -> Seconds:
    """The seconds of an operator's run on a piece; `differentiated`: which operands have a gradient."""
    found = profile.exact.get((body.key, piece.shapes, differentiated))
    if found is not None:
        return Seconds(found.forward, found.backward, MEASURED)
    dtype, count = dense_work(body)[1], sum(differentiated)
    forward, backward = roofline(device, piece.work, dtype, piece.nbytes, count, bool(body.equations))
    plain = float(forward), float(backward)
    neighbours = profile.alike.get((body.key, differentiated))
    if neighbours:
        times = _between(device, neighbours, piece)
        return Seconds(plain[0] * times[0], plain[1] * times[1], INTERPOLATED)
    known = calibration(profile, device)
    table = known.get(kind_of(body)) or known.get(PRODUCTS if piece.work else OTHERS)
    if table is None or not body.equations:
        return Seconds(*plain, ROOFLINE)
    forward, backward = _nearest(table.forward, plain[0]), _nearest(table.backward, plain[1])
    return Seconds(plain[0] * forward, plain[1] * backward, CALIBRATED)


def times_of(m: Measurement, device: Device) -> tuple[float, float]:
    """How many times as long as the roofline says a measurement took, forward and backward."""
    forward, backward = roofline(device, m.work, m.dtype, m.nbytes, m.count)
    return max(m.forward, LEAST) / float(forward), max(m.backward, LEAST) / float(backward) if m.count else 1.0


def _between(device: Device, neighbours: Sequence[Measurement], piece: Piece) -> tuple[float, float]:
    """The mean of the nearest measurements' factors, weighted by closeness, in powers."""
    at = log2(1 + piece.work), log2(1 + piece.nbytes)
    distances = [hypot(log2(1 + m.work) - at[0], log2(1 + m.nbytes) - at[1]) for m in neighbours]
    nearest = sorted(range(len(neighbours)), key=lambda k: (distances[k], k))[:NEIGHBOURS]
    if distances[nearest[0]] == 0:  # other shapes of the same size
        nearest = [k for k in nearest if distances[k] == 0]
    weights = [1 / distances[k] if distances[k] else 1.0 for k in nearest]
    factors = [times_of(neighbours[k], device) for k in nearest]
    means = (sum(w * log(f[which]) for w, f in zip(weights, factors, strict=True)) / sum(weights) for which in (0, 1))
    forward, backward = map(exp, means)
    return forward, backward


@dataclass(frozen=True)
class Calibration:
    """How many times as long as the roofline says a kind of operator takes, by powers of four of the roofline's seconds."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]


def _nearest(table: Mapping[int, float], seconds: float) -> float:
    """The factor of the nearest power that is known (1 where none is)."""
    if not table or seconds <= 0:
        return 1.0
    step = _step(seconds)
    return table[min(table, key=lambda k: (abs(k - step), k))]


def _step(seconds: float) -> int:
    return round(log2(max(seconds, LEAST)) / 2)


@lru_cache(maxsize=64)
def calibration(profile: Profile, device: Device) -> Mapping[str, Calibration]:
    """Every kind's factors on a device: the median of what was measured at each power."""
    found: dict[str, tuple[dict[int, list[float]], dict[int, list[float]]]] = {}
    for m in profile.measurements:
        plain = roofline(device, m.work, m.dtype, m.nbytes, m.count)
        times = times_of(m, device)
        for kind in (m.kind, PRODUCTS if m.work else OTHERS):
            for table, seconds, factor in zip(found.setdefault(kind, ({}, {})), plain, times, strict=True):
                if seconds > 0:  # without gradients there is nothing backward
                    table.setdefault(_step(float(seconds)), []).append(log(factor))
    return {kind: Calibration(_medians(forward), _medians(backward)) for kind, (forward, backward) in found.items()}


def _medians(found: Mapping[int, Sequence[float]]) -> Mapping[int, float]:
    return {step: exp(median(logs)) for step, logs in found.items()}
