"""What a step of a pipeline by 2BW leaves on its way, for the next one to take up (`unity.exec.two_buffered_weights`).

The pipeline and its tail find what they read as the batch before found it, and add up its gradients. What leads to the pipeline
has run forward for that batch, and runs backward in the next step: what it keeps for that is there twice, of the batch before and
of the new one. What follows the tail reads arguments of the batch before.

A flight is made of arrays, as what a loop stacks is: where a compiler would make something again of what else is kept, as the
derivative of a tanh of its result, both are there. And arrays of the flight that are read to the end of a step are copied: those of
the new batch lie in their place as soon as they are there, and arguments are at once, if the backend is eager.
"""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, Value
from unity.pcg.parallel.pipeline_cut import cut, undrained
from unity.pcg.parallel.stages import ends_of, in_flight
from unity.search.memory.backend import Backend
from unity.search.memory.region import Region
from unity.search.memory.residuals import Setting
from unity.search.space.live_buffers import BACKEND, FLIGHT, KEPT, Held, local


def flight(graph: PCG, flow: Gradients, backend: Backend) -> tuple[list[Held], list[Held]]:
    """What of a graph is on its way between two steps; and beside it what the search leaves out: arguments of the batch before,
    what is kept as an array alone, copies. Nothing of a graph whose steps drain."""
    if not undrained(graph) or not any(flow(v) for node in graph.nodes if node.kind == TAIL for v in node.results):
        return [], []
    found, there, copied = list[Held](), set[Value](), list[Held]()
    for node in graph.nodes:
        if node.kind in (PIPELINE, TAIL):
            held = {p: in_flight(node, p, flow) for p in range(len(node.operands))}
            found.append(Held(FLIGHT, node, sum(n * local(node.operands[p], graph) for p, n in held.items())))
            begun = ends_of(node).sampled if node.kind == PIPELINE else ends_of(node).carried
            read = [v for p, v in enumerate(node.operands) if p not in begun]
            copied.append(Held(BACKEND, node, sum(local(v, graph) for v in read)))
            there |= {*read}
    parts = cut(graph)
    setting = Setting(parts.before, flow, True, backend)
    before = Region(parts.before, setting)
    twice = {before.lying.kept[v] for v in there}
    kept = [h for h in before.kept if not any(h.nbytes and v.node is h.node for v in twice)]
    found += [Held(FLIGHT, h.node, h.nbytes) for h in kept]
    arguments = {*before.needs, *parts.read} - {k for k, node in enumerate(graph.inputs) if Value(node) in twice}
    more = [Held(FLIGHT, graph.inputs[k], local(Value(graph.inputs[k]), graph)) for k in sorted(arguments)]
    copied += [replace(h, why=BACKEND) for h in more]
    stacked = Region(parts.before, setting, stacked=True)
    for node in before.nodes:
        nbytes, least = (sum(h.nbytes for h in region.kept if h.node is node) for region in (stacked, before))
        more += [Held(FLIGHT, node, nbytes - least), Held(KEPT, node, nbytes - least)] if nbytes > least else []
    return found, [*more, *(copied if backend.eager else ())]
