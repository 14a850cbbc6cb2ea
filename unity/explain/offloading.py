"""The values that checkpoint policies offload to the host, with the transfers, and the reason if they stay on the device.

Likewise the optimizer's state in the memory of the host.
"""

from __future__ import annotations

from unity.base.formatting import duration, short, size
from unity.pcg.analysis.rematerialization import has_conditional, recomputation
from unity.pcg.ir.gradient_flow import gradients
from unity.plan.plan import Plan
from unity.search.cost.prediction import Prediction


def offloading_in_words(plan: Plan, prediction: Prediction) -> list[str]:
    """Return a text for each line of the user's whose values a checkpoint policy offloads, the longest transfers first.

    Values that stay on the device although a policy offloads them have a text with the reason.
    """
    rows: dict[tuple[str, str], tuple[int, float, float]] = {}
    for t in (t for t in prediction.transfers if not t.of_state):
        key = t.node.kind, short(t.node.source)
        count, nbytes, seconds = rows.get(key, (0, 0.0, 0.0))
        rows[key] = count + t.count, nbytes + t.count * t.nbytes, seconds + t.seconds
    moved = [
        f"{count} × {kind} ({line}): {_moved(plan, nbytes, seconds)}"
        for (kind, line), (count, nbytes, seconds) in sorted(rows.items(), key=lambda row: -row[1][2])
    ]
    return [*moved, *_on_device(plan, {id(t.node) for t in prediction.transfers})]


def state_in_words(plan: Plan, prediction: Prediction) -> list[str]:
    """Return a list of one text about the optimizer's state in the memory of the host, or an empty list without such state."""
    moved = [t for t in prediction.transfers if t.of_state]
    if not moved:
        return []
    weights = plan.program.family.captured.differentiated
    whose = "all weights" if len(moved) == len(weights) else f"{len(moved)} of {len(weights)} weights"
    nbytes, seconds = sum(t.nbytes for t in moved), sum(t.seconds for t in moved)
    return [f"optimizer's state of {whose} on the host: {_moved(plan, nbytes, seconds)}"]


def _moved(plan: Plan, nbytes: float, seconds: float) -> str:
    host = plan.inspect.machine.host
    link = "" if host is None else f" at {host.bandwidth / 1e9:.4g} GB/s"
    return f"{size(nbytes)} of each device to the host and back, {duration(seconds)}{link}"


def _on_device(plan: Plan, offloaded: set[int]) -> list[str]:
    """Return texts about the values that policies offload, but that stay. `offloaded` are the ids of nodes whose values do not."""
    graph, machine = plan.program.pcg, plan.inspect.machine
    if not any(node.policy is not None or has_conditional(node) for node, _ in graph.walk()):
        return []
    policies = recomputation(graph, gradients(graph, plan.program.family.differentiated), kept=())
    nodes = (node for node, _ in graph.walk() if id(node) not in offloaded and policies.host_values(node))
    unlinked = f"{machine.name} has no link to the memory of a host"
    why = unlinked if machine.host is None else "values of pipelines and branches are not offloaded"
    return [
        f"{kind} ({line}) stays on the device: {why} (docs: memory#offloaded-values)"
        for kind, line in dict.fromkeys((node.kind, short(node.source)) for node in nodes)
    ]
