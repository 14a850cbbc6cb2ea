"""The order in which tasks run.

XLA's CPU backend schedules for concurrency, breadth first (BFScheduler): first in, first out, of whatever is ready; arguments are
ready at the start, so what waits for nothing but them runs at the start. On GPUs the order is close to the program's own.
"""

from __future__ import annotations

from collections import deque

from unity.exec.liveness.copies import Task, Tasks

GATHERED = ("while", "barrier")  # their operands are made a tuple first, and their results are taken out of one


def scheduled(tasks: Tasks, eager: bool) -> tuple[Task, ...]:
    """The tasks in the order in which they run."""
    return _breadth_first(tasks) if eager else tasks.tasks


def _breadth_first(tasks: Tasks) -> tuple[Task, ...]:
    """Nodes of the queue: arguments, tasks, and the tuples around tasks, which take a turn like anything else."""
    made: dict[int, tuple] = {v: ("input", v) for v in tasks.inputs}
    needs: dict[tuple, set[tuple]] = {node: set() for node in made.values()}
    for i, task in enumerate(tasks.tasks):
        node, reads = ("task", i), {made[v] for v in task.reads if v in made}
        if task.kind in GATHERED:
            needs["tuple", i], reads = reads, {("tuple", i)}
        needs[node] = reads
        for v in task.results:
            made[v] = ("part", v) if len(task.results) > 1 or task.kind in GATHERED else node
            needs.setdefault(made[v], {node})
    users: dict[tuple, list[tuple]] = {node: [] for node in needs}
    for node, reads in needs.items():
        for other in reads:
            users[other].append(node)
    waits = {node: len(reads) for node, reads in needs.items()}
    ready, order = deque(node for node, n in waits.items() if n == 0), []
    while ready:
        node = ready.popleft()
        if node[0] == "task":
            order.append(tasks.tasks[node[1]])
        for user in users[node]:
            waits[user] -= 1
            if waits[user] == 0:
                ready.append(user)
    return tuple(order)
