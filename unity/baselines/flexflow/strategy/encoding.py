"""Integer encoding of a strategy's tasks: the input and the output of the compiled loop that builds them (`task_builder`).

Most changes of a strategy rebuild some dozens of tasks, so a call of the loop must cost little more than its work. Therefore all
that the loop reads and writes lies in a few int64 arrays; `Strategy` is the face that hides them. Floating-point numbers are
stored by their bits.

*Task names* are integers that say what a task is for, and nothing about other tasks.

*Records* are tasks one after the other: name, device, bits of the seconds, bits of the bytes, number of predecessors, and the names
of the predecessors.

*Blocks* are facts that depend on configurations. Each begins with its own length:

    operator    length, P pieces, whether it runs backward, number of reductions, and the reductions: groups, size, whether
                backward too, bytes, groups * size pieces; then P names of the tasks that end each piece, P names of those that
                end it backward, P devices
    operand     length, n pairs of pieces that share elements, number of parts that several pieces of the producer hold (0 if
                every piece holds a different part); n pieces of the producer, n pieces of the user, n times elements, n parts
    weight      length, number of parts, the number of devices that hold each, the bytes of each; then these devices, by number
    waiting     length, number of pairs forward, number of pairs backward, and the pairs: a piece and the name of a task that it
                waits for

The *header* says what a change rebuilds, whatever the configurations are. Six counts: operators, operators to rebuild (the first
ones), weights, operands to rebuild, operands to reuse, and computations. Then:

    operator to rebuild    the names of its first piece's task and of its first barrier
    weight                 the name of its first barrier, the number of operators that read it, and these operators
    operand to rebuild     its user and its producer, the names of its first transfers forward and backward, whether a gradient
                           flows, and the bytes of an element
    computation            its operator, the direction (0: forward), the name of its first task, whether the backward pass starts
                           there, the number of operands it waits for, and these operands: rebuilt ones before reused ones
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import GONE, Columns, Numbers
from unity.baselines.flexflow.strategy.operators import OperandEdge, Operators, Reduction
from unity.baselines.flexflow.strategy.pieces import Slices, overlap
from unity.baselines.flexflow.strategy.regions import Readers, shared_by_number
from unity.search.simulator.tasks import SimulationError

FORWARD, BACKWARD, REDUCTIONS, TRANSFERS = 0, 1, 2, 1 << 13  # purposes of an operator's tasks; the last two begin numbered ranges
GRADIENT = 0  # the purposes of a weight's all-reduces begin here
WAYS, ENDS = 2, 2  # directions (forward, backward); tasks of a ring (its barrier, and the members that wait for it)
ROW = 1 << 16  # distance between the names of one piece's (or group's) tasks and the next one's
PURPOSE, PURPOSES = ROW * ROW, 1 << 14  # distance between the names for one purpose and for the next; number of purposes
OPERATORS = 1 << 16


def task_name(operator: int, purpose: int, i: int = 0, j: int = 0) -> int:
    """Return a task's name. Names order the tasks of one operator by purpose, in the order of the constants above."""
    return (operator * PURPOSES + purpose) * PURPOSE + i * ROW + j


def parse_name(name: int) -> tuple[int, int, int, int]:
    """Return what a task's name was made of: operator, purpose, i, j."""
    operator, purpose = divmod(name // PURPOSE, PURPOSES)
    return operator, purpose, name // ROW % ROW, name % ROW


def check_named(o: Operators) -> None:
    """Raise SimulationError unless there are names for all tasks that may exist."""
    limit = (PURPOSES - TRANSFERS) // WAYS
    overfull = next((node for node in o.nodes if len(node.operands) > limit), None)
    if overfull is not None:
        raise SimulationError(f"{overfull.source or overfull}: {len(overfull.operands)} operands; a strategy has names for {limit}")
    for noun, count, limit in (("operators", len(o.nodes), OPERATORS), ("devices", o.topology.devices, ROW)):
        if count > limit:
            raise SimulationError(f"{count} {noun}; a strategy has names for the tasks of {limit}")


SECONDS, NBYTES, WAITS, RECORD = 2, 3, 4, 5  # offsets in a record; RECORD is where the predecessors' names begin
TASK, RING = 3, 4  # numbers per entry in `TaskBuffers.tasks` and `.rings`
BARRIER = -1  # in place of a ring's number

NOTHING = np.empty(0, np.int64)


class TaskBuffers(NamedTuple):
    """Buffers for new tasks whose seconds and bytes are not known yet.

    Args:
        records: the tasks' records.
        tasks: for each task the offset of its record, and two numbers: a ring (or BARRIER) and 0; or a link and the bytes sent;
            or the number of a computation and its device.
        rings: for each ring its size, the bits of its bytes, its link of least bandwidth and its link of most latency.
        used: how many numbers of these three arrays are in use; the rest is spare room.
    """

    records: Numbers
    tasks: Numbers
    rings: Numbers
    used: Numbers


def bits(numbers: float | np.ndarray) -> Numbers:
    """Return the bits of floating-point numbers."""
    return np.ascontiguousarray(numbers, np.float64).view(np.int64)


def change_between(old: Numbers, new: Numbers) -> Columns:
    """Return the change that leads from some tasks to others. Both arrays hold records in the order of names."""
    (name, device, waits), moments, before = diff_records(old, new)
    seconds, nbytes = moments.view(np.float64)
    return Columns(name, device, seconds, nbytes, waits, before)


def _same(old: Numbers, i: int, new: Numbers, j: int) -> bool:
    """Return whether the records at two offsets are equal."""
    for k in range(RECORD + old[i + WAITS]):  # noqa: SIM110 (which compiles to something slower)
        if old[i + k] != new[j + k]:
            return False
    return True


@partial(compiled, parts=(_same,))
def diff_records(old: Numbers, new: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Compute the change between two arrays of records: its columns, with seconds and bytes by their bits."""
    i, j, count, places = 0, 0, 0, 0
    rows = np.empty((len(old) + len(new)) // RECORD, np.int64)  # negative: a removed task, as -1 - offset in `old`
    while i < len(old) or j < len(new):
        removed = j == len(new) or (i < len(old) and old[i] < new[j])
        added = not removed and (i == len(old) or new[j] < old[i])
        if removed:
            rows[count] = -1 - i
            count += 1
        elif added or not _same(old, i, new, j):
            rows[count] = j
            count, places = count + 1, places + new[j + WAITS]
        if not added:
            i += RECORD + old[i + WAITS]
        if not removed:
            j += RECORD + new[j + WAITS]
    numbers, moments, before, place = np.zeros((3, count), np.int64), np.zeros((2, count), np.int64), np.empty(places, np.int64), 0
    for k in range(count):
        j = rows[k]
        if j < 0:
            numbers[0, k], numbers[1, k] = old[-1 - j], GONE
            continue
        numbers[0, k], numbers[1, k], numbers[2, k] = new[j], new[j + 1], new[j + WAITS]
        moments[0, k], moments[1, k] = new[j + SECONDS], new[j + NBYTES]
        for b in range(new[j + WAITS]):
            before[place + b] = new[j + RECORD + b]
        place += new[j + WAITS]
    return numbers, moments, before


OPERATOR, REDUCTION, OPERAND, WEIGHT, WAITING = 4, 4, 3, 2, 3  # lengths of the fixed part at the start of each block


def operator_block(pieces: int, backward: bool, reductions: Sequence[Reduction]) -> Numbers:
    """Return an operator's block without its last part, the devices of its pieces."""
    parts = [np.zeros(0, np.int64)]
    for r in reductions:
        parts += [np.array([*r.groups.shape, r.backward], np.int64), bits(np.array([r.nbytes])), r.groups.ravel()]
    facts = np.concatenate(parts)
    head = np.array([OPERATOR + len(facts) + 3 * pieces, pieces, backward, len(reductions)], np.int64)
    return np.concatenate((head, facts, np.zeros(2 * pieces, np.int64)))


@lru_cache(maxsize=65536)
def operand_block(producer_slices: Slices, user_slices: Slices) -> Numbers:
    """Return the block of an operand whose producer and user cut it like this."""
    first, second, elements = overlap(producer_slices, user_slices)
    parts = producer_slices.slices if producer_slices.copied else 0
    rows = [first, second, elements, producer_slices.slice_of[first]][: 4 if parts else 3]
    return np.concatenate((np.array([OPERAND + len(rows) * len(first), len(first), parts], np.int64), *rows))


@lru_cache(maxsize=4096)
def weight_block(readers: Readers, itemsize: int) -> Numbers:
    """Return the block of a weight with elements of `itemsize` bytes. Devices of `readers` are numbered (`regions.numbered`)."""
    parts = shared_by_number(readers)
    head = np.array([WEIGHT + 2 * len(parts.counts) + len(parts.devices), len(parts.counts)], np.int64)
    return np.concatenate((head, parts.counts, bits(itemsize * parts.elements), parts.devices))


@dataclass(frozen=True)
class AffectedTasks:
    """Operators whose configurations may change, and all the tasks around them that have to be rebuilt then.

    Args:
        changed: the operators.
        referenced: other operators that their tasks refer to.
        weights: the (node, result) of values with a gradient that the operators read.
        edges: the operators' operands, and their results wherever others read them.
        reused: the other operands that computations to rebuild wait for; their blocks are reused.
        computations: the computations to rebuild: (operator, 0 forward or 1 backward).
        first_names: the lowest possible name of the tasks of each changed operator, weight, edge and computation.
        weight_positions: where the only changed operator reads the weights; None if other operators read them too.
        header: the header (see the module's docstring).
    """

    changed: tuple[int, ...]
    referenced: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]
    edges: tuple[OperandEdge, ...]
    reused: tuple[OperandEdge, ...]
    computations: tuple[tuple[int, int], ...]
    first_names: tuple[int, ...]
    weight_positions: tuple[int, ...] | None
    header: Numbers

    @cached_property
    def names(self) -> tuple[tuple[int, int], ...]:
        """The edges by (user, position)."""
        return tuple(e[:2] for e in self.edges)

    @cached_property
    def ordered(self) -> tuple[int, ...]:
        """The lowest names, in order."""
        return tuple(sorted(self.first_names))


def affected_by(o: Operators, changed: Collection[int]) -> AffectedTasks:
    """Collect the tasks that depend on the configurations of some operators."""
    edges = {e[:2]: e for k in changed for e in (*o.incoming[k], *o.outgoing[k])}
    weights = tuple(dict.fromkeys(w for k in changed for w in o.reads[k]))
    forward = dict.fromkeys((*changed, *(e.user for e in edges.values())))
    backward = dict.fromkeys((*changed, *(e.producer for e in edges.values() if e.flows)))
    waited = [(e[:2], e) for k in forward for e in o.incoming[k]] + [(e[:2], e) for k in backward for e in o.outgoing[k] if e.flows]
    reused = {name: e for name, e in waited if name not in edges}
    users = (k for w in weights for k, _ in o.weights[w])
    producers = (e.producer for e in edges.values())  # the producer of a value without a gradient computes nothing anew
    referenced = tuple(k for k in dict.fromkeys((*forward, *backward, *producers, *users)) if k not in changed)
    computations = (*((k, 0) for k in forward), *((k, 1) for k in backward))
    shape = (tuple(changed), referenced, weights, tuple(edges.values()), tuple(reused.values()), computations)
    first_names = (
        *(task_name(k, REDUCTIONS) for k in changed),
        *(task_name(node, GRADIENT + r * ENDS) for node, r in weights),
        *(task_name(k, TRANSFERS + p * WAYS) for k, p in edges),
        *(task_name(k, BACKWARD if way else FORWARD) for k, way in computations),
    )
    alone = len(shape[0]) == 1 and all(len(o.weights[w]) == 1 for w in weights)
    weight_positions = tuple(p for w in weights for _, p in o.weights[w]) if alone else None
    return AffectedTasks(*shape, first_names, weight_positions, np.array([*_header(o, *shape)], np.int64))


def _header(
    o: Operators,
    changed: tuple[int, ...],
    referenced: tuple[int, ...],
    weights: tuple[tuple[int, int], ...],
    edges: tuple[OperandEdge, ...],
    reused: tuple[OperandEdge, ...],
    computations: tuple[tuple[int, int], ...],
) -> Iterator[int]:
    """Yield the numbers of the header (see the module's docstring)."""
    at = {k: q for q, k in enumerate((*changed, *referenced))}
    place = {e[:2]: p for p, e in enumerate((*edges, *reused))}
    yield from (len(at), len(changed), len(weights), len(edges), len(reused), len(computations))
    for k in changed:
        yield from (task_name(k, FORWARD), task_name(k, REDUCTIONS))
    for node, result in weights:
        users = [at[k] for k, _ in o.weights[node, result]]
        yield from (task_name(node, GRADIENT + result * ENDS), len(users), *users)
    for e in edges:
        ahead, back = (task_name(e.user, TRANSFERS + e.position * WAYS + way) for way in range(WAYS))
        yield from (at[e.user], at[e.producer], ahead, back, e.flows, o.nodes[e.producer].tensors[e.result].itemsize)
    for k, way in computations:
        operands = [place[e[:2]] for e in (o.outgoing[k] if way else o.incoming[k]) if e.flows or not way]
        yield from (at[k], way, task_name(k, BACKWARD if way else FORWARD), way and k in o.ends, len(operands), *operands)
