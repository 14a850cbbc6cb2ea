"""Time curves of collectives among the devices of this process: every kind, group size and a range of message sizes.

All groups of a size communicate at the same time, as in one program for all devices, so that shared links, or shared cores of a
host, are part of the figures. Bytes are those of the full side on one device, as in `unity.machine.collectives`. Rounds go through
all sizes and the median counts: plans depend on how sizes compare, and other load on the host then affects all of them alike.

A tensor that is gathered or scattered along another dimension than the first is transposed on the way, which doubles the time or
more: it has a separate curve. An all-to-all transposes at one side or the other; its curve is the mean of both.

In a program, devices reach a collective at slightly different times, with cold caches. On virtual devices that makes small
collectives two to four times as slow as one collective after another. So a matrix product and a pass over memory precede each
collective, and their own time is subtracted.

The search prices all changes of type at once, by lines. So a line is fitted to each curve with the least relative error; the error
is stored beside it, with the points (TensorOpt, section 3.2, interpolates them instead).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.base.processes import agreed
from unity.exec.hosts.arrays import place
from unity.exec.measure.timing import repetitions, seconds_of
from unity.machine.hardware import Curve
from unity.pcg.types.varying_axes import vary

RINGS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}  # kind -> number of passes around a ring
ROUNDS = 3
RUN, MOST = 0.003, 1 << 14  # target seconds of a run, and the most repetitions
LONG = 0.3  # seconds that a run need not exceed, however noisy
SIZES = tuple(1 << i for i in (13, 16, 19, 22))  # bytes
ROW = 64  # elements of a row, where rows are concatenated or split
TOTAL = 1 << 29  # bytes of all devices together: there may be many virtual ones on a small host
LEAST = 1e-6  # seconds; smaller differences are noise of a busy host
SHARE = 0.01  # the least latency of a fitted line, as a fraction of the shortest time measured
WIDTH, TOUCHED = 128, 1 << 18  # of the matrix product before a collective, and the bytes of the pass over memory
GROUP = "group"

Run = Callable[[Sequence[int], bool], float]  # (repetitions of each size, whether to communicate) -> seconds
Collective = Callable[[Any], Any]


def curves(
    devices: Sequence[Any], sizes: Sequence[int] = SIZES, rounds: int = ROUNDS, units: int | None = None
) -> tuple[Curve, ...]:
    """Measure every collective in groups of every size that divides `units` (default: the number of devices).

    Groups are of neighbours in `devices`.
    """
    count, units = len(devices), units or len(devices)
    chosen = [n for n in sizes if n * count <= TOTAL // 8] or [min(sizes)]
    runs: dict[tuple[str, bool, int], list[Run]] = {}
    for group in (g for g in range(2, units + 1) if units % g == 0):
        mesh = Mesh(np.array(devices).reshape(-1, group), ("other", GROUP))
        most = max(ROW * group, max(chosen) // 4)
        x = place(np.ones((count, most), np.float32), NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        for (kind, turned), ways in COLLECTIVES.items():
            runs[kind, turned, group] = [_run(mesh, way, chosen, kind == "all-gather", x) for way in ways]
    times = {key: [_times(run, k, len(chosen)) for run in ways for k in range(len(chosen))] for key, ways in runs.items()}
    samples: dict[tuple[str, bool, int], list[list[float]]] = {key: [[] for _ in chosen] for key in runs}
    for _ in range(rounds):
        for key, ways in runs.items():
            repeated = np.reshape(times[key], (len(ways), len(chosen))).tolist()
            each = [_seconds(run, n) for run, n in zip(ways, repeated, strict=True)]
            for k, seconds in enumerate(zip(*each, strict=True)):
                samples[key][k].append(sum(seconds) / len(seconds))
    return tuple(
        line(kind, group, [(n, median(x)) for n, x in zip(chosen, each, strict=True)], turned)
        for (kind, turned, group), each in samples.items()
    )


def _seconds(run: Run, times: Sequence[int]) -> list[float]:
    """Return the seconds of one collective of every size, in one round: those that it adds to the work before it."""
    pairs = [_both(run, k, n, len(times)) for k, n in enumerate(times)]
    return [max((together - before) / n, LEAST) for (together, before), n in zip(pairs, times, strict=True)]


def _both(run: Run, which: int, times: int, sizes: int) -> tuple[float, float]:
    """Return the seconds of collectives of one size with the work before them, and of that work alone."""
    repeated = [times if k == which else 0 for k in range(sizes)]
    return run(repeated, True), run(repeated, False)


def line(kind: str, group: int, points: Sequence[tuple[int, float]], turned: bool = False) -> Curve:
    """Fit a line to points (bytes, seconds) with the least relative error. Its latency and its slope are positive."""
    positive = [(n, s) for n, s in points if s > 0]
    if not positive:
        raise ValueError(f"{kind} in groups of {group}: no time was measured")
    nbytes, seconds = (np.array(x, float) for x in zip(*positive, strict=True))
    terms = np.stack([1 / seconds, nbytes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(positive)), rcond=None)[0].tolist() if len(positive) > 1 else (0.0, 0.0)
    least = SHARE * float(seconds.min())
    if alpha < least or beta <= 0:  # noise hides one of them: count nearly all as transfer, too slow rather than infinitely fast
        alpha, beta = least, float((terms[:, 1] * (1 - least * terms[:, 0])).sum() / (terms[:, 1] ** 2).sum())
    error = float(np.sqrt(np.mean((alpha * terms[:, 0] + beta * terms[:, 1] - 1) ** 2)))
    return Curve(kind, group, alpha, beta, error, tuple(positive), turned)


def _run(mesh: Mesh, collective: Collective, sizes: Sequence[int], gathers: bool, x: jax.Array) -> Run:
    """Compile a loop that runs a collective on the beginning of `x`, at each size for a given number of times.

    The collective is in a branch that only an argument decides, so that the compiler can neither shorten the loop nor hoist code.
    """
    names, group = mesh.axis_names, mesh.shape[GROUP]
    spec = PartitionSpec(names)
    unit = ROW * group  # elements that every way to cut divides
    starts = [max(unit, n // 4 // (group if gathers else 1) // unit * unit) for n in sizes]

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(), spec), out_specs=spec)
    def run(communicates: Any, times: Any, x: Any) -> Any:
        ends = []
        matrix, touched = (vary(jnp.zeros(shape, x.dtype), names) for shape in ((WIDTH, WIDTH), (TOUCHED // 4,)))
        for k, n in enumerate(starts):
            piece = x[0, :n]
            result = vary(jnp.zeros(jax.eval_shape(collective, piece).shape, x.dtype), names)
            step = partial(_step, communicates, collective, piece, names)
            ends.append(lax.fori_loop(0, times[k], step, (matrix, touched, result)))
        return [end.reshape(1, -1)[:, :1] for loop in ends for end in loop]

    program = run.lower(np.int32(1), np.zeros(len(sizes), np.int32), x).compile()

    def seconds(times: Sequence[int], communicates: bool) -> float:
        elapsed = seconds_of(lambda: program(np.int32(communicates), np.array(times, np.int32), x))
        return elapsed if x.is_fully_addressable else agreed(elapsed)

    for communicates in (True, False):  # the first run, which touches the memory first, takes longer
        seconds([1] * len(sizes), communicates)
    return seconds


def _step(communicates: Any, collective: Collective, piece: Any, names: Sequence[str], _: Any, before: Any) -> Any:
    """Run a matrix product, a pass over memory, and a collective that depends on both."""
    matrix, touched, result = before
    matrix, touched = matrix @ matrix, touched + matrix[0, 0]
    ready = piece + touched[0]
    result = lax.cond(communicates > 0, lambda x, _: vary(collective(x), names), lambda _, old: old, ready, result)
    return matrix, touched, result


def _rows(x: Any) -> Any:
    """Return the array as rows that the devices of a group can share evenly."""
    return x.reshape(-1, ROW * lax.axis_size(GROUP))


# (kind, whether it transposes) -> the forms in which programs use it
COLLECTIVES: Mapping[tuple[str, bool], tuple[Collective, ...]] = {
    ("all-reduce", False): (lambda x: lax.psum(x, GROUP),),
    ("all-gather", False): (lambda x: lax.all_gather(x, GROUP, tiled=True),),
    ("all-gather", True): (lambda x: lax.all_gather(x.reshape(-1, ROW), GROUP, axis=1, tiled=True),),
    ("reduce-scatter", False): (lambda x: lax.psum_scatter(x, GROUP, tiled=True),),
    ("reduce-scatter", True): (lambda x: lax.psum_scatter(_rows(x), GROUP, scatter_dimension=1, tiled=True),),
    ("all-to-all", False): (
        lambda x: lax.all_to_all(x.reshape(lax.axis_size(GROUP), -1), GROUP, 0, 0),
        lambda x: lax.all_to_all(_rows(x), GROUP, 1, 0, tiled=True),
    ),
    ("collective-permute", False): (lambda x: lax.ppermute(x, GROUP, _next(lax.axis_size(GROUP))),),
}


def _next(devices: int) -> list[tuple[int, int]]:
    """Return the pairs in which every device of a group sends to the next one."""
    return [(k, (k + 1) % devices) for k in range(devices)]


def _times(run: Run, which: int, sizes: int) -> int:
    """Return the number of repetitions of a size with which a run takes about `RUN` seconds.

    The collective's time is a difference, which other load on the host may hide at any number of repetitions. So a run counts as at
    least the share of `RUN` that its total time is of `LONG`, and no run takes far longer than `LONG`.
    """

    def seconds(times: int) -> float:
        both = [_both(run, which, times, sizes) for _ in range(2)]
        return max(min(a - b for a, b in both), RUN * min(both)[0] / LONG)

    return repetitions(seconds, RUN, MOST)
