"""Memory of the *flight*: the values that a step of a 2BW pipeline passes to the next one (`unity.exec.two_buffered_weights`).

The pipeline and its tail read operands of the batch before, and accumulate its gradients. The operators before the pipeline have
run forward for that batch, and run backward in the next step, so their residuals are live twice: for the batch before and for the
new one. The operators after the tail read arguments of the batch before.

A flight consists of arrays, as the stacks of a loop do: where a compiler would recompute a value from another residual, such as the
derivative of a tanh from its result, both are live. Arrays of the flight that are read until the end of a step are copied, because
those of the new batch take their memory as soon as they are computed; for arguments that is immediately, if the backend is eager.
"""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, Value
from unity.pcg.parallel.pipeline_cut import cut, undrained
from unity.pcg.parallel.stages import ends_of, in_flight
from unity.search.memory.backend import Backend
from unity.search.memory.residuals import Nesting, Setting
from unity.search.memory.sweep import sweep
from unity.search.space.live_buffers import BACKEND, FLIGHT, KEPT, Buffer, local


def flight(graph: PCG, flow: Gradients, backend: Backend) -> tuple[list[Buffer], list[Buffer]]:
    """Return the buffers of a graph's flight: those that the search counts, and those that it does not.

    The latter are arguments of the batch before, residuals that are live only because they are arrays, and copies. A graph whose
    steps drain has no flight.
    """
    if not undrained(graph) or not any(flow(v) for node in graph.nodes if node.kind == TAIL for v in node.results):
        return [], []
    counted, operands, copied = list[Buffer](), set[Value](), list[Buffer]()
    for node in graph.nodes:
        if node.kind in (PIPELINE, TAIL):
            copies = {p: in_flight(node, p, flow) for p in range(len(node.operands))}
            counted.append(Buffer(FLIGHT, node, sum(n * local(node.operands[p], graph) for p, n in copies.items())))
            begun = ends_of(node).sampled if node.kind == PIPELINE else ends_of(node).carried
            read = [v for p, v in enumerate(node.operands) if p not in begun]
            copied.append(Buffer(BACKEND, node, sum(local(v, graph) for v in read)))
            operands |= {*read}
    parts = cut(graph)
    setting = Setting(parts.before, flow, True, backend)
    before = sweep(parts.before, setting)
    twice = {before.residuals.aliases.kept[v] for v in operands}
    residuals = [h for h in before.kept if not any(h.nbytes and v.node is h.node for v in twice)]
    counted += [Buffer(FLIGHT, h.node, h.nbytes) for h in residuals]
    arguments = {*before.needs, *parts.read} - {k for k, node in enumerate(graph.inputs) if Value(node) in twice}
    uncounted = [Buffer(FLIGHT, graph.inputs[k], local(Value(graph.inputs[k]), graph)) for k in sorted(arguments)]
    copied += [replace(h, why=BACKEND) for h in uncounted]
    stacked = sweep(parts.before, setting, Nesting(stacks=True))
    for node in before.nodes:
        nbytes, least = (sum(h.nbytes for h in region.kept if h.node is node) for region in (stacked, before))
        uncounted += [Buffer(FLIGHT, node, nbytes - least), Buffer(KEPT, node, nbytes - least)] if nbytes > least else []
    return counted, [*uncounted, *(copied if backend.eager else ())]
