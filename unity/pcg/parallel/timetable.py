"""The timetable of 1F1B: the pass and the micro-batch of every stage in every half tick, so that few micro-batches are in flight.

A tick has two halves. In the first, even stages run a forward pass and odd ones a backward pass; in the second it is the other way
round. S = 3 stages, M = 3 micro-batches; f and b are a micro-batch's forward and backward pass:

    tick       0         1         2         3         4
    stage 0  f0   .    f1   .    f2  b0     .  b1     .  b2
    stage 1   .  f0     .  f1    b0  f2    b1   .    b2   .
    stage 2   .   .    f0  b0    f1  b1    f2  b2     .   .

After each half, the stages that ran a forward pass and their successors exchange: activations go on, their gradients come back. So
the gradient of a micro-batch reaches stage s after S - s - 1/2 ticks, and at most S - s micro-batches are in flight there. Every
stage runs its passes in the published order (PipeDream-Flush, Megatron-LM).

If an exchange waits for its two stages only, as between GPUs that send and receive, the whole takes (M + S - 1) (F + B), for a
forward pass of F and a backward pass of B. If it waits for all devices, as on XLA's CPU backend, a half tick takes the longer of
the two.

Samples are stored on all stages, in M / S rows. The same exchanges move each sample to stage 0 just in time for its forward pass,
and its gradient from stage 0 back to its home stage. The first row is in ascending order of stages and the last one in descending
order, so that the first samples and the last gradients have a short way. A single row starts on every other stage, away from stage
0, and comes back on the stages between them; its gradients need one extra tick to get home.

If training steps follow each other without draining (2BW), micro-batch 0 of the next batch comes after the last one of this batch.
The same order then delivers the samples of a batch from its first tick on, and its last gradients after 2 M ticks.

All functions take integers, or arrays of them.
"""

from __future__ import annotations

from typing import Any

HALVES = (0, 1)


def forward_micro_batch(tick: Any, stage: Any) -> Any:
    """Return the micro-batch whose forward pass a stage runs in a tick. Numbers out of range mean no pass."""
    return tick - stage // 2


def backward_micro_batch(tick: Any, stage: Any, stages: int) -> Any:
    """Return the micro-batch whose backward pass a stage runs in a tick. Numbers out of range mean no pass."""
    return tick - (stages - 1) + stage // 2


def incoming_micro_batch(tick: Any, stage: Any) -> Any:
    """Return the micro-batch whose samples pass a stage on their way to stage 0, after the stage's backward pass in a tick."""
    return tick + stage // 2 + 1


def returning_micro_batch(tick: Any, stage: Any, stages: int) -> Any:
    """Return the micro-batch whose gradient passes a stage on its way home, after the stage's backward pass in a tick."""
    return tick - (stages - 1) - (stage + 1) // 2


def home(number: Any, stages: int, rows: int) -> tuple[Any, Any]:
    """Return the stage that stores a micro-batch, and its row there."""
    row, k = number // stages, number % stages
    if rows == 1:
        return (k > 0) * (2 * k <= stages) * (2 * k - 1) + (2 * k > stages) * 2 * (stages - k), row
    return k + (row == rows - 1) * (stages - 1 - 2 * k), row


def drain_ticks(stages: int, rows: int) -> int:
    """Return the number of ticks after the last backward pass until the last gradient is home."""
    return int(rows == 1 and stages > 1)


def pairs(stages: int, half: int) -> list[tuple[int, int]]:
    """Return the pairs of stages that exchange after a half: the first has run a forward pass, the second a backward pass."""
    return [(k, k + 1) for k in range(half, stages - 1, 2)]


def exchanges_per_tick(stages: int) -> int:
    """Return the number of exchanges in a tick: one after each half in which some stages have a partner."""
    return sum(bool(pairs(stages, half)) for half in HALVES)
