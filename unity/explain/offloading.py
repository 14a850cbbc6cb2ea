"""The values that checkpoint policies offload to the host, with the transfers, and the reason if they stay on the device."""

from __future__ import annotations

from unity.base.formatting import duration, short, size
from unity.pcg.analysis.rematerialization import recomputation
from unity.pcg.ir.gradient_flow import gradients
from unity.plan.plan import Plan
from unity.search.cost.prediction import Prediction


def offloading_in_words(plan: Plan, prediction: Prediction) -> list[str]:
    """Return a text for each line of the user's whose values a checkpoint policy offloads, the longest transfers first.

    Without a link to the host, the texts say that the values stay on the device.
    """
    machine = plan.inspect.machine
    if machine.host is None:
        return _on_device(plan)
    rows: dict[tuple[str, str], tuple[int, float, float]] = {}
    for t in prediction.transfers:
        key = t.node.kind, short(t.node.source)
        count, nbytes, seconds = rows.get(key, (0, 0.0, 0.0))
        rows[key] = count + t.count, nbytes + t.count * t.nbytes, seconds + t.seconds
    link = f"{machine.host.bandwidth / 1e9:.4g} GB/s"
    return [
        f"{count} × {kind} ({line}): {size(nbytes)} of each device to the host and back, {duration(seconds)} at {link}"
        for (kind, line), (count, nbytes, seconds) in sorted(rows.items(), key=lambda row: -row[1][2])
    ]


def _on_device(plan: Plan) -> list[str]:
    """Return the texts for a machine without a link to the host."""
    graph = plan.program.pcg
    if not any(node.policy is not None for node, _ in graph.walk()):
        return []
    recomputed = recomputation(graph, gradients(graph, plan.program.family.differentiated))
    nodes = (node for node, _ in graph.walk() if recomputed.offloaded_of(node))
    return [
        f"{kind} ({line}) stays on the device: {plan.inspect.machine.name} has no link to the memory of a host"
        " (docs: memory#offloaded-values)"
        for kind, line in dict.fromkeys((node.kind, short(node.source)) for node in nodes)
    ]
