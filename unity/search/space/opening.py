"""Opening a graph: flattens scans, remats, pipelines and branches into one list of sites, in the order in which they run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.recomputed_region import Place
from unity.pcg.analysis.rematerialization import Recomputation, recomputation
from unity.pcg.analysis.residuals import recomputable, residuals
from unity.pcg.analysis.stacked_values import NO_KERNELS, StackingKernels, stacking_kernels
from unity.pcg.analysis.views import is_conversion
from unity.pcg.ir.gradient_flow import Gradients, gradients
from unity.pcg.ir.graph import BRANCHES, CONSTRAIN, PCG, PIPELINE, STAGES, TAIL, Node, Value, accumulated_loss, reserved_axes
from unity.pcg.ir.payloads import Scan
from unity.pcg.ir.program import Tensor
from unity.pcg.parallel import branches
from unity.pcg.parallel.dead_values import ignores
from unity.pcg.parallel.stages import (
    TWO_BW,
    ends_of,
    in_flight,
    inside_state,
    outside_state,
    runs_of,
    schedule_of,
    sends,
    staged,
)
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED
from unity.search.space.contributions import refuse_cancelling_contributions
from unity.search.space.residual_types import count_residuals
from unity.search.space.shared_copies import GraphUse, similar_uses, uses_by_branch
from unity.search.space.sites import Around, Port, Site, Sites, Slicing, Where, copies, small


def sites_of(graph: PCG, differentiated: Collection[int], training: bool, buffered: bool = False) -> Sites:
    """Open a serial graph.

    Args:
        graph: The graph.
        differentiated: The inputs, by number, whose gradients are wanted; ignored without training.
        training: Whether there is a backward pass.
        buffered: Whether reductions read what they reduce from memory, as on a CPU.
    """
    weights = frozenset(differentiated) if training else frozenset[int]()
    flow = gradients(graph, weights)
    less, again = hoisted(graph, flow), recomputation(graph, flow)
    builder = _Builder(flow, weights, less, again, stacking_kernels(graph, flow, less, again), buffered)
    builder.add_program(graph)
    count_residuals(builder.sites, builder.needed, builder.flying)
    builder.choose_reruns()
    builder.double_leading_residuals()
    refuse_cancelling_contributions(builder.sites)
    return Sites(tuple(builder.sites), builder.of_node, builder.operands, builder.outputs, builder.results)


def _last(through: Sequence[int], where: Where) -> Where:
    """Return where a value arrives that passes through these free sites."""
    return (through[-1], 0) if through else where


class _Builder:
    """A walk over a graph and those inside it that appends sites.

    Attributes:
        sites, of_node, operands, outputs, results: As in `Sites`.
        groups: The branch that each operator inside branches is in, by the operator's id.
        flying: For the free site of each operand of a pipeline, the size of what is live of it for the batch before, as a
            multiple of the operand's.
        leading: The number of sites before a 2BW pipeline.
        needed: Values that are residuals in their own type whoever else reads them, with the surroundings of these readers.
        remats: The number of remats so far.
    """

    def __init__(
        self,
        flow: Gradients,
        differentiated: frozenset[int],
        hoisting: Mapping[int, int],
        recomputed: Recomputation,
        stacking: Mapping[int, StackingKernels],
        buffered: bool,
    ) -> None:
        self.flow, self.differentiated, self.hoisting, self.recomputed = flow, differentiated, hoisting, recomputed
        self.stacking, self.buffered = stacking, buffered
        self.sites: list[Site] = []
        self.of_node: dict[int, int] = {}
        self.operands: dict[tuple[int, int], tuple[int, ...]] = {}
        self.outputs: dict[tuple[int, int], tuple[int, ...]] = {}
        self.results: dict[int, tuple[Where, ...]] = {}
        self.groups: dict[int, int] = {}
        self.flying: dict[int, float] = {}
        self.leading = 0
        self.needed: dict[Where, list[Around]] = {}
        self.remats = 0

    def add(self, site: Site) -> int:
        """Append a site and return its number."""
        site.stored = [0.0] * len(site.results)
        self.sites.append(site)
        return len(self.sites) - 1

    def port(self, where: Where, around: Around, kept: bool = False, places: Iterable[Place] = (), dead: bool = False) -> Port:
        """Return a port to a result of a site.

        Args:
            where: The result.
            around: The control flow around the port.
            kept: Whether it is a residual.
            places: The places of the graph that read it.
            dead: Whether all of these ignore its value.
        """
        site = self.sites[where[0]]
        tensor, gradient = site.results[where[1]], site.flows[where[1]]
        copied = site.kind == "free" and copies(site) and not site.step and site.ports[0].argument
        argument = around == Around() and (site.kind == "input" or copied)
        transparent = site.kind == "free" and copies(site) and not site.step
        transparent = transparent or (site.body is not None and is_conversion(site.body))
        last = around == Around() and (site.kind == "input" or (transparent and site.ports[0].last))
        residuals = around.of(site.hoisted) if kept else 0.0
        repeats, passed = self.recomputed.read(places)
        return Port(
            *where,
            tensor,
            around.times,
            gradient,
            residuals,
            again=around.again,
            repeats=float(repeats),
            passed=float(passed),
            argument=argument,
            last=last,
            hoisted=site.hoisted,
            dead=dead,
        )

    def add_program(self, graph: PCG) -> None:
        """Add the sites of the outermost graph, with its arguments and results."""
        arguments = []
        for k, node in enumerate(graph.inputs):
            weight = k in self.differentiated and node.tensors[0].floating
            site = Site("input", node, [], node.tensors, flows=(self.flow(Value(node)),), weight=weight, whole=True)
            self.of_node[id(node)] = self.add(site)
            arguments.append((self.of_node[id(node)], 0))
        for k, where in enumerate(self.add_nodes(graph, arguments, Around())):
            free = self.add_free(where, Around(), whole=True)
            self.leave(graph, k, free)

    def add_free(
        self,
        where: Where,
        around: Around,
        step: Slicing = Slicing.NONE,
        whole: bool = False,
        tensor: Any = None,
        of: Node | None = None,
        places: Iterable[Place] = (),
        dead: bool = False,
    ) -> int:
        """Add a site where the type of a value is free, and return its number.

        Args:
            where: The value.
            around: The control flow around the site.
            step: The additional dimension of the operand or the result.
            whole: Whether the value crosses the program's boundary.
            tensor: The result, if it differs from the operand.
            of: The node whose value it becomes in another graph.
            places: The places of the graph that read the value.
            dead: Whether all of these ignore the value.
        """
        port = self.port(where, around, places=places, dead=dead)
        result, hoisted_by = tensor or port.tensor, port.hoisted if of is None else self.hoisting.get(id(of), 1)
        return self.add(Site("free", None, [port], (result,), around, (port.gradient,), step=step, whole=whole, hoisted=hoisted_by))

    def choose_reruns(self) -> None:
        """Mark the operators that the backward pass may rerun with their reader instead of keeping their result.

        An operator qualifies outside of remats if each of its operands is a residual anyway, is a small argument, or becomes a
        residual in exchange, where such operands together are smaller than the residuals saved. It has a single reader, as each
        reader would rerun it, and that is a product, whose gradient needs its operands and nothing else.
        """
        readers: dict[int, list[tuple[int, int]]] = {}
        for s, site in enumerate(self.sites):
            for p, port in enumerate(site.ports):
                readers.setdefault(port.source, []).append((s, p))
        for s, site in enumerate(self.sites):
            if site.kind != "operator" or site.again or site.offloaded or len(site.results) != 1 or len(readers.get(s, ())) != 1:
                continue
            ((u, p),) = readers[s]
            reader = self.sites[u]
            product = reader.is_product and reader.around == site.around
            if product and reader.ports[p].kept and site.ports and any(site.flows):
                missing = [q for q, port in enumerate(site.ports) if not (port.kept or small(port, site))]
                saved = site.results[0].nbytes + sum(nbytes for _, nbytes in site.inner)
                pays_off = sum(site.ports[q].tensor.nbytes for q in missing) < saved
                if pays_off and not any(site.ports[q].argument for q in missing):
                    site.reader, site.instead = (u, p), tuple(missing)

    def double_leading_residuals(self) -> None:
        """Double the residuals before a pipeline that does not drain, as it keeps two batches (`search.memory.in_flight`)."""
        for site in self.sites[: self.leading]:
            if site.kind != "input":
                site.around = replace(site.around, alive=2 * site.around.alive)
                site.stored = [2 * count for count in site.stored]
                site.ports = [replace(port, kept=2 * port.kept) for port in site.ports]

    def add_nodes(self, graph: PCG, inputs: Sequence[Where], around: Around) -> list[Where]:
        """Add the sites of a graph whose inputs are the values `inputs`, and return its outputs."""
        values: dict[Value, Where] = {Value(n): w for n, w in zip(graph.inputs, inputs, strict=True)}
        visited = set[Value]()
        siblings = sum(node.kind == "remat" for node in graph.nodes)
        for node in graph.nodes:
            if node.kind == "input":
                continue
            operands = []
            for p, v in enumerate(node.operands):
                if v not in visited:
                    visited.add(v)
                    self.add_shared_copies(graph, v, values[v], around)
                operands.append(_last(self.operands.get((id(node), p), ()), values[v]))
            if node.kind == CONSTRAIN:
                outputs = self.add_constrained(node, operands[0], around)
            elif node.kind == "scan":
                outputs = self.add_scan(node, operands, around)
            elif node.kind == PIPELINE:
                outputs = self.add_pipeline(node, operands, around)
            elif node.kind == TAIL:
                outputs = self.add_tail(node, operands, around)
            elif node.kind == BRANCHES:
                outputs = self.add_branches(node, operands, around)
            elif node.kind == STAGES:
                outputs = self.add_stages(node, operands, around)
            elif node.kind == "remat":
                assert node.inside is not None
                for p, where in enumerate(operands):
                    if not self.recomputed.is_unread(node, p):  # a residual
                        self.needed.setdefault(where, []).append(around)
                self.remats += 1
                outputs = self.add_nodes(node.inside, operands, around.remat(siblings, self.remats))
                self.results[id(node)] = tuple(outputs)
            else:
                outputs = self.add_operator(node, operands, around)
            values.update(zip(node.results, outputs, strict=True))
        for v in dict.fromkeys(graph.outputs):
            if v not in visited:
                self.add_shared_copies(graph, v, values[v], around)
        return [_last(self.outputs.get((id(graph), k), ()), values[v]) for k, v in enumerate(graph.outputs)]

    def add_shared_copies(self, graph: PCG, v: Value, where: Where, around: Around) -> None:
        """Add the copies of a value that its uses share: one for all uses in a branch, and one for each group of similar ones.

        A group of all uses gets one copy. The copies of each use are recorded in `operands` or `outputs`.
        """
        for uses in uses_by_branch(graph, v, self.groups):
            similar = similar_uses(uses)
            common = [self.add_shared_copy(where, around, uses)] if len(similar) > 1 else []
            for alike in similar:
                own = [self.add_shared_copy(_last(common, where), around, alike)] if len(alike) > 1 else []
                for user, p in alike if common or own else ():
                    recorded = self.operands if isinstance(user, Node) else self.outputs
                    recorded[id(user), p] = (*common, *own)

    def add_shared_copy(self, where: Where, around: Around, uses: Sequence[GraphUse]) -> int:
        """Add a copy of a value that several uses share, and return its number."""
        dead = all(isinstance(user, Node) and ignores(user, p) for user, p in uses)
        return self.add_free(where, around, places=[(id(user), p) for user, p in uses], dead=dead)

    def add_constrained(self, node: Node, where: Where, around: Around) -> list[Where]:
        """Add the site of a value whose type the user constrains."""
        site = self.of_node[id(node)] = self.add_free(where, around, places=[(id(node), 0)])
        self.sites[site].mark = node
        return [(site, 0)]

    def add_operator(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """Add the site of an operator and return its results."""
        flows = tuple(self.flow(v) for v in node.results)
        flags = tuple(self.sites[s].flows[r] and any(flows) for s, r in operands)
        assert node.body is not None
        needed = residuals(node.body, flags, around.stacked, self.buffered)
        read = zip(operands, needed.operands, strict=True)
        ports = [self.port(w, around, k, [(id(node), p)], ignores(node, p)) for p, (w, k) in enumerate(read)]
        hosted = needed.hosted if id(node) in self.recomputed.in_branches else ()
        inner = tuple(value for k, value in enumerate(needed.inner) if k not in hosted)
        may_recompute = not around.again and not hosted and recomputable(node.body, needed)
        operator = Site("operator", node, ports, node.tensors, around, flows, inner=inner, recomputable=may_recompute)
        operator.hoisted = self.hoisting.get(id(node), 1)
        operator.repeats = float(self.recomputed.repeats(node))
        operator.stacking = self.stacking.get(id(node), NO_KERNELS)
        operator.computed = tuple((v, float(runs)) for v, runs in self.recomputed.variables_of(node))
        saved, offloaded = self.recomputed.saved_of(node), self.recomputed.host_values(node)
        operator.saved = tuple((v, around.lasting[depth] * node.body.tensors[v].nbytes) for v, depth in saved)
        operator.offloaded = tuple((v, nbytes, around.lasting[depth]) for v, nbytes, depth in offloaded)
        site = self.add(operator)
        self.of_node[id(node)] = site
        self.needed.update(((site, k), [around]) for k, flag in enumerate(needed.results) if flag)
        return [(site, k) for k in range(len(node.tensors))]

    def enter(self, node: Node, p: int, free: int) -> None:
        """Append the free site through which an operand enters a graph to the shared copies that it passes."""
        self.operands[id(node), p] = (*self.operands.get((id(node), p), ()), free)

    def leave(self, graph: PCG, k: int, free: int) -> None:
        """Append the free site through which an output leaves a graph to the shared copies that it passes."""
        self.outputs[id(graph), k] = (*self.outputs.get((id(graph), k), ()), free)

    def add_scan(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """Add the sites of a scan: constants and carries have one type for all steps, and stacks are not partitioned by step."""
        assert node.inside is not None
        inside, loop = node.inside, node.of(Scan)
        c, k = loop.consts, loop.carry
        loss = accumulated_loss(node)
        accumulates = loss is not None and self.flow(loss)
        inner = around.accumulating(loop.length) if accumulates else around.scan(loop.length)
        inputs: list[Where] = []
        for p, (where, n) in enumerate(zip(operands, inside.inputs, strict=True)):
            step = Slicing.SLICE if p >= c + k else Slicing.NONE
            free = self.add_free(where, around, step=step, tensor=n.tensors[0], of=n, places=[(id(node), p)])
            flows = self.flow(Value(n))
            if c <= p < c + k:  # a carry's result may have a gradient where its initial value has none
                self.sites[free].around = inner
                flows = flows or self.flow(Value(node, p - c))
            self.sites[free].flows = (flows,)
            self.of_node[id(n)] = free
            self.enter(node, p, free)
            inputs.append((free, 0))
        ends = self.add_nodes(inside, inputs, inner)
        results: list[Where] = []
        for q, where in enumerate(ends):
            if q < k:
                carry = inputs[c + q][0]
                self.sites[carry].ports.append(self.port(where, inner, places=[(id(inside), q)]))
                self.leave(inside, q, carry)
                results.append((carry, 0))
            else:
                free = self.add_free(where, inner, step=Slicing.STACK, tensor=node.tensors[q], of=node, places=[(id(inside), q)])
                self.leave(inside, q, free)
                results.append((free, 0))
        self.results[id(node)] = tuple(results)
        return results

    def add_pipeline(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """Add the sites of a pipeline: those of a scan, with a single choice along the stage axes for everything inside."""
        assert node.inside is not None
        first, schedule, ends = len(self.sites), schedule_of(node), ends_of(node)
        if schedule.kind == TWO_BW and any(map(self.flow, node.results)):
            self.leading = first
        inner = around.pipeline(schedule.runs, schedule.residual_steps)
        inputs: list[Where] = []
        for p, where in enumerate(operands):
            carried = p in ends.carried
            step = Slicing.CARRY if carried else Slicing.NONE if p in ends.constants else Slicing.SLICE
            inputs.append((self.add_boundary(node, p, where, around, step), 0))
            if carried:
                self.sites[inputs[-1][0]].around = inner
        for q, where in enumerate(self.add_nodes(node.inside, inputs, inner)):
            self.finish_carry(inputs[ends.carried[q]][0], self.port(where, inner), node.tensors[q])
            self.leave(node.inside, q, inputs[ends.carried[q]][0])
        self.assign_staged_choices(node, first, [s for s, _ in inputs])
        results = [(inputs[p][0], 1) for p in ends.carried]
        self.results[id(node)] = tuple(results)
        return results

    def add_tail(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """Add the sites of a pipeline's tail, which reads the carries as the last step leaves them; its results are not stacked."""
        assert node.inside is not None
        first, ends = len(self.sites), ends_of(node)
        inputs: list[Where] = []
        for p, where in enumerate(operands):
            if p in ends.carried:
                self.of_node[id(node.inside.inputs[p])] = where[0]
                inputs.append((where[0], 0))
            else:
                inputs.append((self.add_boundary(node, p, where, around, Slicing.SLICE if p in ends.read else Slicing.NONE), 0))
        results = self.add_nodes(node.inside, inputs, around.tail(runs_of(node, self.flow)))
        self.assign_staged_choices(node, first, [s for s, _ in inputs])
        self.results[id(node)] = tuple(results)
        return results

    def add_boundary(self, node: Node, p: int, where: Where, around: Around, step: Slicing) -> int:
        """Add the free site through which an operand enters a pipeline or its tail."""
        assert node.inside is not None
        n = node.inside.inputs[p]
        free = self.of_node[id(n)] = self.add_free(where, around, step=step, tensor=n.tensors[0], of=n, places=[(id(node), p)])
        site = self.sites[free]
        site.flows = (self.flow(Value(n)),)
        site.staged = Choice("staged", (outside_state(node, p),), (inside_state(node, p),), 0, 0.0)
        site.sends, site.returns = (around.times * times for times in sends(node, p, self.flow))
        schedule, ends = schedule_of(node), ends_of(node)
        pieces = 1 if p in ends.constants else schedule.rounds if p in ends.sampled else schedule.slots
        self.flying[free] = pieces * in_flight(node, p, self.flow)
        self.enter(node, p, free)
        return free

    def assign_staged_choices(self, node: Node, first: int, entries: Collection[int]) -> None:
        """Assign the single choice along the stage axes to the sites inside a pipeline or its tail."""
        choices = staged(node)
        self.enclose(first, reserved_axes(node), entries)
        for site in self.sites[first:]:
            if site.node is not None:
                site.staged = choices[id(site.node)]
            elif site.staged is None:  # a shared copy
                site.staged = self.copied_choice(site)

    def enclose(self, first: int, names: tuple[str, ...], entries: Collection[int]) -> None:
        """Mark all sites from `first` on as inside control flow that devices along the axes `names` do not take together.

        The sites in `entries` are where values enter: their first operand changes its type outside.
        """
        for s, site in enumerate(self.sites[first:], first):
            outside = 1 if s in entries else 0
            inside = (replace(port, apart=(*port.apart, *names)) for port in site.ports[outside:])
            site.along, site.ports = names, [*site.ports[:outside], *inside]

    def add_branches(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """Add the sites of all branches side by side; along the axes of the groups everything inside is replicated."""
        assert node.inside is not None
        first, inner = len(self.sites), around.beside(branches.weight_of(node))
        inputs, results = list[Where](), list[Where]()
        self.record_groups(node)
        for p, (where, n) in enumerate(zip(operands, node.inside.inputs, strict=True)):
            free = self.add_free(
                where, around, step=Slicing.SLICE if p in branches.packed_of(node) else Slicing.NONE, tensor=n.tensors[0], of=n
            )
            self.sites[free].flows = (self.flow(Value(n)),)
            self.sites[free].staged = Choice("replicated", (branches.outside_state(node, p),), (REPLICATED,), 0, 0.0)
            self.of_node[id(n)] = free
            self.enter(node, p, free)
            inputs.append((free, 0))
        for q, where in enumerate(self.add_nodes(node.inside, inputs, inner)):
            free = self.add_free(where, around, of=node)
            self.sites[free].staged = Choice("partial", (REPLICATED,), (PARTIAL,), 0, 0.0)
            self.leave(node.inside, q, free)
            results.append((free, 0))
        self.enclose(first, reserved_axes(node), [s for s, _ in inputs])
        for site in self.sites[first:]:
            site.staged = site.staged or branches.replicated_choice(site.node, len(site.ports), len(site.results))
        self.results[id(node)] = tuple(results)
        return results

    def add_stages(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """Add the sites of all stages side by side, reading the operands of a step; their common results have one type."""
        assert node.inside is not None
        self.record_groups(node)
        results = self.add_nodes(node.inside, operands, around.beside(branches.weight_of(node)))
        self.results[id(node)] = tuple(results)
        return results

    def record_groups(self, node: Node) -> None:
        """Record the group of every operator of branches or stages."""
        for k, group in enumerate(branches.groups_of(node)):
            self.groups.update((id(n), k) for n in group.graph.nodes)

    def finish_carry(self, carry: int, end: Port, stack: Tensor) -> None:
        """Complete the site of a pipeline's carry.

        Its operands are the stacked initial values and the end of a step; its results the start of a step and the stacked results.
        """
        site = self.sites[carry]
        assert site.staged is not None
        (whole,), (slice_,) = site.staged.operands, site.staged.results
        site.staged = Choice("staged", (whole, slice_), (slice_, whole), 0, 0.0)
        site.ports.append(end)
        site.results = (*site.results, stack)
        site.flows = (*site.flows, *site.flows)
        site.stored = [*site.stored, 0.0]

    def copied_choice(self, site: Site) -> Choice:
        """Return the choice of a copy along stage axes: the state of the value that it copies."""
        (port,) = site.ports
        staged = self.sites[port.source].staged
        assert staged is not None
        state = staged.results[port.index]
        return Choice("staged", (state,), (state,), 0, 0.0)
