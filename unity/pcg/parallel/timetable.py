"""1F1B's timetable: which stage does which micro-batch when, so that only as many wait for their backward pass as stages follow.

A tick has two halves. In the first, even stages do a forward pass and odd ones a backward pass; in the second it is the other way
round. S = 3 stages, M = 3 micro-batches; f and b are a micro-batch's forward and backward pass:

    tick       0         1         2         3         4
    stage 0  f0   .    f1   .    f2  b0     .  b1     .  b2
    stage 1   .  f0     .  f1    b0  f2    b1   .    b2   .
    stage 2   .   .    f0  b0    f1  b1    f2  b2     .   .

After a half those stages that did a forward pass and those that follow them exchange: samples go on, their gradients go back. So
a micro-batch comes back to stage s after S - s ticks less a half, and S - s of them are there at most. The order in which a stage
does its passes is the published one (PipeDream-Flush, Megatron-LM).

Where an exchange waits for its two stages only, as GPUs send and receive, all takes (M + S - 1) (F + B), whatever a forward pass F
and a backward pass B take. Where it waits for all devices, as on XLA's CPU backend, a half tick takes the longer of both.

Samples are stored on all stages, in rows of M / S. With the same exchanges they come down to stage 0 just when it wants them, and
their gradients go up from there, home. The first row is taken from stage 0 up and the last one from the last stage down, so that
the first need not come far, and the last gradients need not go far. Where there is one row only, samples are stored further and
further away from stage 0, on every other stage, and then, on those between, nearer and nearer; one tick more brings them home.

Where steps follow each other without draining (2BW), micro-batch 0 of the next batch is the one after the last. A batch's samples
are there from its first tick on, and its last gradients are home after two times M ticks: that, too, is so by this order.

All functions take integers, or arrays of them.
"""

from __future__ import annotations

from typing import Any

FORWARD, BACKWARD = "f", "b"
HALVES = (0, 1)


def forth(tick: Any, stage: Any) -> Any:
    """The micro-batch whose forward pass a stage does in a tick, if there is one of this number."""
    return tick - stage // 2


def back(tick: Any, stage: Any, stages: int) -> Any:
    """The micro-batch whose backward pass a stage does in a tick, if there is one of this number."""
    return tick - (stages - 1) + stage // 2


def coming(tick: Any, stage: Any) -> Any:
    """The micro-batch that comes by a stage on its way down in a tick, after the stage's backward pass."""
    return tick + stage // 2 + 1


def going(tick: Any, stage: Any, stages: int) -> Any:
    """The micro-batch whose gradient comes to a stage on its way home in a tick, after the stage's backward pass."""
    return tick - (stages - 1) - (stage + 1) // 2


def home(number: Any, stages: int, rows: int) -> tuple[Any, Any]:
    """The stage where a micro-batch is stored, and in which row."""
    row, k = number // stages, number % stages
    if rows == 1:
        return (k > 0) * (2 * k <= stages) * (2 * k - 1) + (2 * k > stages) * 2 * (stages - k), row
    return k + (row == rows - 1) * (stages - 1 - 2 * k), row


def drained(stages: int, rows: int) -> int:
    """How many ticks more it takes until the last gradient is home."""
    return int(rows == 1 and stages > 1)


def pairs(stages: int, half: int) -> list[tuple[int, int]]:
    """The stages that exchange after a half: the first of each has done a forward pass, the second a backward pass."""
    return [(k, k + 1) for k in range(half, stages - 1, 2)]


def exchanges(stages: int) -> int:
    """After how many halves of a tick stages exchange."""
    return sum(bool(pairs(stages, half)) for half in HALVES)


def timetable(stages: int, micro_batches: int) -> list[list[tuple[str, int] | None]]:
    """What every stage does in every half tick: which pass of which micro-batch, or nothing."""
    rows = []
    for tick in range(micro_batches + stages - 1):
        for half in HALVES:
            row = [(FORWARD, forth(tick, s)) if s % 2 == half else (BACKWARD, back(tick, s, stages)) for s in range(stages)]
            rows.append([found if 0 <= found[1] < micro_batches else None for found in row])
    return rows
