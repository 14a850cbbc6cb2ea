"""Measures collectives among the devices of this process: every kind, in groups of every size, with from few bytes to many.

All groups of a size communicate at the same time, as they do in one program for all devices: where they share links, or a host's
cores, the figures have that in them. Bytes are those of the full side on one device, as in `unity.search.collectives`. All sizes
take turns, and the median counts: plans depend on how they compare, and whatever else the host does meets all of them alike.

A tensor that is gathered or scattered along another dimension than the first is turned on the way, which takes as long again, or
several times as long. Programs do both, and costs do not tell dimensions apart; so the mean of both is what a collective takes.

A search prices all changes of types at once, by lines. So a line is drawn through each curve, so that it is off by the least parts
of what was measured; how much it is off is kept beside it, with the points (TensorOpt, section 3.2, interpolates them instead).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.exec.parallel import vary
from unity.search.hardware import Curve

RINGS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}  # and how often a ring goes round for it
ROUNDS = 5
RUN = 0.004  # seconds that a run should take
SIZES = tuple(1 << i for i in range(12, 23, 2))  # bytes
ROW = 64  # elements of a row, where rows are put together or cut up
TOTAL = 1 << 29  # bytes of all devices together: there may be many virtual ones on a small host
GROUP = "group"

Run = Callable[[Sequence[int]], float]  # from how often each size is repeated to seconds
Collective = Callable[[Any], Any]


def curves(devices: Sequence[Any], sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> tuple[Curve, ...]:
    """Every collective in groups of every size that the number of devices allows, on one level of `devices`."""
    count = len(devices)
    chosen = [n for n in sizes if n * count <= TOTAL // 8] or [min(sizes)]
    runs: dict[tuple[str, int], list[Run]] = {}
    for group in (g for g in range(2, count + 1) if count % g == 0):
        mesh = Mesh(np.array(devices).reshape(-1, group), ("other", GROUP))
        most = max(ROW * group, max(chosen) // 4)
        x = jax.device_put(np.ones((count, most), np.float32), NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        for kind, ways in COLLECTIVES.items():
            runs[kind, group] = [_run(mesh, way, chosen, kind == "all-gather", x) for way in ways]
    times = {key: [_times(run, k, len(chosen)) for run in ways for k in range(len(chosen))] for key, ways in runs.items()}
    found: dict[tuple[str, int], list[list[float]]] = {key: [[] for _ in chosen] for key in runs}
    for _ in range(rounds):
        for key, ways in runs.items():
            repeated = np.reshape(times[key], (len(ways), len(chosen))).tolist()
            each = [_seconds(run, n) for run, n in zip(ways, repeated, strict=True)]
            for k, seconds in enumerate(zip(*each, strict=True)):
                found[key][k].append(sum(seconds) / len(seconds))
    return tuple(line(*key, [(n, median(x)) for n, x in zip(chosen, each, strict=True)]) for key, each in found.items())


def _seconds(run: Run, times: Sequence[int]) -> list[float]:
    """Seconds of one collective of every size, in one round."""
    call = min(run([0] * len(times)) for _ in range(3))
    return [max(run([n if j == k else 0 for j in range(len(times))]) - call, 0.0) / n for k, n in enumerate(times)]


def line(kind: str, group: int, points: Sequence[tuple[int, float]]) -> Curve:
    """The line through points (bytes, seconds) that is off them by the least parts, neither end of it below zero."""
    kept = [(n, s) for n, s in points if s > 0]
    if not kept:
        raise ValueError(f"{kind} in groups of {group}: no time was measured")
    nbytes, seconds = (np.array(x, float) for x in zip(*kept, strict=True))
    terms = np.stack([1 / seconds, nbytes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(kept)), rcond=None)[0].tolist() if len(kept) > 1 else (0.0, 0.0)
    if alpha < 0 or beta <= 0:  # noise hides one of them: all the time counts as transfer, too slow rather than infinitely fast
        alpha, beta = 0.0, float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum())
    error = float(np.sqrt(np.mean((alpha * terms[:, 0] + beta * terms[:, 1] - 1) ** 2)))
    return Curve(kind, group, alpha, beta, error, tuple(kept))


def _run(mesh: Mesh, collective: Collective, sizes: Sequence[int], gathers: bool, x: jax.Array) -> Run:
    """Runs a collective on the beginning of `x` at each size as often as it is told. What is repeated stands in a branch
    (`unity.exec.profile`)."""
    names, group = mesh.axis_names, mesh.shape[GROUP]
    spec = PartitionSpec(names)
    unit = ROW * group  # elements that every way to cut divides
    starts = [max(unit, n // 4 // (group if gathers else 1) // unit * unit) for n in sizes]

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(), spec), out_specs=spec)
    def run(go: Any, times: Any, x: Any) -> Any:
        ends = []
        for k, n in enumerate(starts):
            piece = x[0, :n]
            first = vary(jnp.zeros(jax.eval_shape(collective, piece).shape, x.dtype), names)
            end = lax.fori_loop(0, times[k], partial(_step, go, collective, piece, names), first)
            ends.append(end.reshape(1, -1)[:, :1])
        return ends

    program = run.lower(np.int32(1), np.zeros(len(sizes), np.int32), x).compile()

    def seconds(times: Sequence[int]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(np.int32(1), np.array(times, np.int32), x))
        return time.perf_counter() - start

    return seconds


def _step(go: Any, collective: Collective, piece: Any, names: Sequence[str], _: Any, before: Any) -> Any:
    return lax.cond(go > 0, lambda old: vary(collective(piece), names), lambda old: old, before)


def _rows(x: Any) -> Any:
    """Rows of which every device gets an equal part."""
    return x.reshape(-1, ROW * lax.axis_size(GROUP))


# Each in the ways that programs have it: along the first dimension, and along another.
COLLECTIVES: Mapping[str, tuple[Collective, ...]] = {
    "all-reduce": (lambda x: lax.psum(x, GROUP),),
    "all-gather": (
        lambda x: lax.all_gather(x, GROUP, tiled=True),
        lambda x: lax.all_gather(x.reshape(-1, ROW), GROUP, axis=1, tiled=True),
    ),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, GROUP, tiled=True),
        lambda x: lax.psum_scatter(_rows(x), GROUP, scatter_dimension=1, tiled=True),
    ),
    "all-to-all": (
        lambda x: lax.all_to_all(x.reshape(lax.axis_size(GROUP), -1), GROUP, 0, 0),
        lambda x: lax.all_to_all(_rows(x), GROUP, 1, 0, tiled=True),
    ),
}


def _times(run: Run, which: int, sizes: int) -> int:
    """How often a size is repeated to take as long as a run should."""
    run([1] * sizes)  # what is touched first takes longer
    times, call = 1, min(run([0] * sizes) for _ in range(3))
    while True:
        taken = min(run([times if k == which else 0 for k in range(sizes)]) for _ in range(2)) - call
        if taken >= RUN / 2 or times >= 1 << 14:
            return times
        times *= max(2, min(16, ceil(RUN / max(taken, RUN / 16))))
