"""Opens a graph: its sites, those inside of scans, remats, pipelines and branches among them, in the order in which they run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.rematerialization import Place, Recomputation, recomputation
from unity.pcg.analysis.residuals import recomputable, residuals
from unity.pcg.analysis.views import is_view
from unity.pcg.ir.gradient_flow import Gradients, gradients
from unity.pcg.ir.graph import BRANCHES, CONSTRAIN, PCG, PIPELINE, STAGES, TAIL, Node, Value
from unity.pcg.ir.program import Tensor
from unity.pcg.parallel import branches
from unity.pcg.parallel.stages import (
    TWO_BW,
    ends_of,
    in_flight,
    inside_state,
    names_of,
    outside_state,
    runs_of,
    schedule_of,
    sends,
    staged,
)
from unity.pcg.propagation.choices import Choice
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED
from unity.search.space.sites import Around, Port, Site, Sites, Where, copies, small


def sites_of(graph: PCG, differentiated: Collection[int], training: bool) -> Sites:
    """Opens a serial graph. `differentiated`: the inputs that gradients are taken for (none count if not training)."""
    flow = gradients(graph, differentiated if training else ())
    builder = _Builder(flow, frozenset(differentiated) if training else frozenset(), hoisted(graph), recomputation(graph, flow))
    builder.top(graph)
    builder.keep()
    builder.pair()
    builder.fly()
    return Sites(tuple(builder.sites), builder.of_node, builder.operands, builder.outputs, builder.results)


class _Builder:
    """Walks graphs inside out, appending sites."""

    def __init__(self, flow: Gradients, differentiated: frozenset[int], less: Mapping[int, int], anew: Recomputation) -> None:
        """`less`: `pcg.hoisting.hoisted`; `anew`: what the backward pass computes again."""
        self.flow, self.differentiated, self.less, self.anew = flow, differentiated, less, anew
        self.sites: list[Site] = []
        self.of_node: dict[int, int] = {}
        self.operands: dict[tuple[int, int], tuple[int, ...]] = {}
        self.outputs: dict[tuple[int, int], tuple[int, ...]] = {}
        self.results: dict[int, tuple[Where, ...]] = {}
        self.groups: dict[int, int] = {}  # of branches: the group that each of their operators is in
        self.flying: dict[int, int] = {}  # of what pipelines find: how many of it are held for the batch before
        self.leading = 0  # to a pipeline by 2BW: how many sites
        self.needed: dict[Where, set[float]] = {}  # kept as they are, whoever else reads them; and how often that one runs

    def add(self, site: Site) -> int:
        site.stored = [0.0] * len(site.results)
        self.sites.append(site)
        return len(self.sites) - 1

    def port(self, where: Where, around: Around, kept: bool = False, places: Iterable[Place] = ()) -> Port:
        """An operand that is read at these places of the graph."""
        site = self.sites[where[0]]
        tensor, gradient = site.results[where[1]], site.flows[where[1]]
        copied = site.kind == "free" and copies(site) and not site.step and site.ports[0].argument
        argument = around == Around() and (site.kind == "input" or copied)
        seen = site.kind == "free" and copies(site) and not site.step and site.ports[0].last
        seen = seen or (site.node is not None and site.node.body is not None and is_view(site.node.body) and site.ports[0].last)
        last = around == Around() and (site.kind == "input" or seen)
        held = around.of(site.hoisted) if kept else 0.0
        repeats, passed = self.anew.read(places)
        return Port(
            *where,
            tensor,
            around.times,
            gradient,
            held,
            again=around.again,
            repeats=repeats,
            passed=passed,
            argument=argument,
            last=last,
            hoisted=site.hoisted,
        )

    def top(self, graph: PCG) -> None:
        given = []
        for k, node in enumerate(graph.inputs):
            weight = k in self.differentiated and node.tensors[0].floating
            site = Site("input", node, [], node.tensors, flows=(self.flow(Value(node)),), weight=weight, whole=True)
            self.of_node[id(node)] = self.add(site)
            given.append((self.of_node[id(node)], 0))
        for k, where in enumerate(self.graph(graph, given, Around())):
            free = self.free(where, Around(), whole=True)
            self.outputs[id(graph), k] = (free,)

    def free(
        self,
        where: Where,
        around: Around,
        step: str = "",
        whole: bool = False,
        tensor: Any = None,
        of: Node | None = None,
        places: Iterable[Place] = (),
    ) -> int:
        """A place where the type of a value may be chosen. `of`: the node that has it, where that is in another graph; `places`:
        where the value is read."""
        port = self.port(where, around, places=places)
        result, less = tensor or port.tensor, port.hoisted if of is None else self.less.get(id(of), 1)
        return self.add(Site("free", None, [port], (result,), around, (port.gradient,), step=step, whole=whole, hoisted=less))

    def keep(self) -> None:
        """Settles what is kept where. A free site passes a need on to what it is a copy of; only a carry is stacked there.

        A value that one operator alone reads is kept as that operator sees it; others as they are made, and once more for
        everyone who must change them.
        """
        readers: dict[Where, list[tuple[int, int]]] = {}
        for s in reversed(range(len(self.sites))):
            site = self.sites[s]
            if copies(site) and ((s, 0) in self.needed or (s, 0) in readers):
                site.ports[0] = replace(site.ports[0], kept=site.alive)
            for p, port in enumerate(site.ports):
                if port.kept:
                    readers.setdefault((port.source, port.index), []).append((s, p))
        for s, site in enumerate(self.sites):
            for k in range(len(site.results)):
                found = [(u, p, self.sites[u].ports[p]) for u, p in readers.get((s, k), ())]
                times = {port.times for _, _, port in found} | self.needed.get((s, k), set())
                if copies(site) or not times:
                    continue
                alone = [(port.times, port.kept) for *_, port in found] == [(site.around.times, site.alive)]
                if alone and site.kind != "input" and (s, k) not in self.needed:
                    u, p, port = found[0]
                    self.sites[u].ports[p] = replace(port, sole=True)
                elif site.kind == "free":  # a carry: its stack for the steps, its last value for what comes after
                    after = site.ports[0].times / site.around.times
                    stack, last = site.around.times in times, bool(times - {site.around.times})
                    site.stored[k] = site.alive * (stack + last * after)
                else:
                    site.stored[k] = site.alive
        for s, count in self.flying.items():
            self.sites[s].stored[0] += count

    def pair(self) -> None:
        """Finds the operators outside of remats that may run again with their reader in the backward pass, from operands that are
        kept anyway, are small arguments, or are kept instead and are less than what need not be kept then.

        There is one reader, as each would run it again; and that is a product, which needs its operands and no more.
        """
        readers: dict[int, list[tuple[int, int]]] = {}
        for s, site in enumerate(self.sites):
            for p, port in enumerate(site.ports):
                readers.setdefault(port.source, []).append((s, p))
        for s, site in enumerate(self.sites):
            if site.kind != "operator" or site.again or len(site.results) != 1 or len(readers.get(s, ())) != 1:
                continue
            ((u, p),) = readers[s]
            reader = self.sites[u]
            product = reader.node is not None and facts_of(reader.node.kind).product and reader.around == site.around
            if product and reader.ports[p].kept and site.ports and any(site.flows):
                missing = [q for q, port in enumerate(site.ports) if not (port.kept or small(port, site))]
                saved = site.results[0].nbytes + sum(nbytes for _, nbytes in site.inner)
                less = sum(site.ports[q].tensor.nbytes for q in missing) < saved
                if less and not any(site.ports[q].argument for q in missing):
                    site.reader, site.instead = (u, p), tuple(missing)

    def fly(self) -> None:
        """What leads to a pipeline that does not drain keeps everything for two batches (`search.flight`)."""
        for site in self.sites[: self.leading]:
            if site.kind != "input":
                site.around = replace(site.around, alive=2 * site.around.alive)
                site.stored = [2 * count for count in site.stored]
                site.ports = [replace(port, kept=2 * port.kept) for port in site.ports]

    def graph(self, graph: PCG, given: Sequence[Where], around: Around) -> list[Where]:
        """Adds the sites of a graph whose inputs are at `given`; returns where its outputs are."""
        at: dict[Value, Where] = {Value(n): w for n, w in zip(graph.inputs, given, strict=True)}
        copies: dict[tuple[Value, str], int] = {}
        remats = sum(node.kind == "remat" for node in graph.nodes)
        for node in graph.nodes:
            if node.kind == "input":
                continue
            operands = []
            for p, v in enumerate(node.operands):
                copy = self.copy(graph, node, p, v, at[v], copies, around)
                operands.append(at[v] if copy is None else (copy, 0))
                if copy is not None:
                    self.operands[id(node), p] = (copy,)
            if node.kind == CONSTRAIN:
                found = self.mark(node, operands[0], around)
            elif node.kind == "scan":
                found = self.scan(node, operands, around)
            elif node.kind == PIPELINE:
                found = self.pipeline(node, operands, around)
            elif node.kind == TAIL:
                found = self.tail(node, operands, around)
            elif node.kind == BRANCHES:
                found = self.branches(node, operands, around)
            elif node.kind == STAGES:
                found = self.stages(node, operands, around)
            elif node.kind == "remat":
                assert node.inside is not None
                for where in operands:  # what a remat starts from is kept
                    self.needed.setdefault(where, set()).add(around.times)
                found = self.graph(node.inside, operands, around.remat(remats))
                self.results[id(node)] = tuple(found)
            else:
                found = self.operator(node, operands, around)
            at.update(zip(node.results, found, strict=True))
        return [at[v] for v in graph.outputs]

    def copy(self, graph: PCG, node: Node, p: int, v: Value, where: Where, copies: dict, around: Around) -> int | None:
        """The copy that an operand shares with other users of the same kind (None: it shares none)."""
        if not facts_of(node.kind).product:
            return None
        group = self.groups.get(id(node))  # branches on other devices share none
        key = (v, f"{node.kind} {p} {group}")
        if key not in copies:
            alike = [u for u, q in graph.users[id(v.node)] if u.kind == node.kind and u.operands[q] == v and q == p]
            users = [u for u in alike if self.groups.get(id(u)) == group]
            copies[key] = self.free(where, around, places=[(id(u), p) for u in users]) if len(users) > 1 else -1
        return None if copies[key] < 0 else copies[key]

    def mark(self, node: Node, where: Where, around: Around) -> list[Where]:
        """The same value, of a type that the user gave."""
        site = self.of_node[id(node)] = self.free(where, around, places=[(id(node), 0)])
        self.sites[site].mark = node
        return [(site, 0)]

    def operator(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        flows = tuple(self.flow(v) for v in node.results)
        flags = tuple(self.sites[s].flows[r] and any(flows) for s, r in operands)
        assert node.body is not None
        kept = residuals(node.body, flags, around.stacked)
        read = zip(operands, kept.operands, strict=True)
        ports = [self.port(w, around, k, [(id(node), p)]) for p, (w, k) in enumerate(read)]
        again = not around.again and recomputable(node.body, kept)
        less = self.less.get(id(node), 1)
        site = self.add(
            Site("operator", node, ports, node.tensors, around, flows, inner=kept.inner, recomputable=again, hoisted=less)
        )
        self.sites[site].repeats, self.sites[site].computed = self.anew.repeats(node), self.anew.variables_of(node)
        self.of_node[id(node)] = site
        self.needed.update(((site, k), {around.times}) for k, flag in enumerate(kept.results) if flag)
        return [(site, k) for k in range(len(node.tensors))]

    def scan(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """Constants and carries have one type for all steps; of what is stacked, the steps are not partitioned."""
        assert node.inside is not None
        inside, c, k = node.inside, int(node.attributes["consts"]), int(node.attributes["carry"])
        inner = around.scan(int(node.attributes["length"]))
        given: list[Where] = []
        for p, (where, n) in enumerate(zip(operands, inside.inputs, strict=True)):
            free = self.free(where, around, step="in" if p >= c + k else "", tensor=n.tensors[0], of=n, places=[(id(node), p)])
            flows = self.flow(Value(n))
            if c <= p < c + k:  # what a single step leaves may have a gradient, and what it starts with none
                self.sites[free].around = inner
                flows = flows or self.flow(Value(node, p - c))
            self.sites[free].flows = (flows,)
            self.of_node[id(n)] = free
            self.operands[id(node), p] = (*self.operands.get((id(node), p), ()), free)
            given.append((free, 0))
        ends = self.graph(inside, given, inner)
        found: list[Where] = []
        for q, where in enumerate(ends):
            if q < k:
                carry = given[c + q][0]
                self.sites[carry].ports.append(self.port(where, inner, places=[(id(inside), q)]))
                self.outputs[id(inside), q] = (carry,)
                found.append((carry, 0))
            else:
                free = self.free(where, inner, step="out", tensor=node.tensors[q], of=node, places=[(id(inside), q)])
                self.outputs[id(inside), q] = (free,)
                found.append((free, 0))
        self.results[id(node)] = tuple(found)
        return found

    def pipeline(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """As a scan; along the stage axes everything inside has the one choice that stages leave it."""
        assert node.inside is not None
        first, schedule, ends = len(self.sites), schedule_of(node), ends_of(node)
        if schedule.kind == TWO_BW and any(map(self.flow, node.results)):
            self.leading = first
        inner = around.pipeline(schedule.runs, schedule.kept)
        given: list[Where] = []
        for p, where in enumerate(operands):
            carried = p in ends.carried
            step = "through" if carried else "" if p in ends.constants else "in"
            given.append((self.end(node, p, where, around, step), 0))
            if carried:
                self.sites[given[-1][0]].around = inner
        for q, where in enumerate(self.graph(node.inside, given, inner)):
            self.through(given[ends.carried[q]][0], self.port(where, inner), node.tensors[q])
            self.outputs[id(node.inside), q] = (given[ends.carried[q]][0],)
        self.on_stages(node, first, [s for s, _ in given])
        found = [(given[p][0], 1) for p in ends.carried]
        self.results[id(node)] = tuple(found)
        return found

    def tail(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """What follows a pipeline finds what was carried as the last step leaves it. Its results are there once."""
        assert node.inside is not None
        first, ends = len(self.sites), ends_of(node)
        given: list[Where] = []
        for p, where in enumerate(operands):
            if p in ends.carried:
                self.of_node[id(node.inside.inputs[p])] = where[0]
                given.append((where[0], 0))
            else:
                given.append((self.end(node, p, where, around, "in" if p in ends.read else ""), 0))
        found = self.graph(node.inside, given, around.tail(runs_of(node, self.flow)))
        self.on_stages(node, first, [s for s, _ in given])
        self.results[id(node)] = tuple(found)
        return found

    def end(self, node: Node, p: int, where: Where, around: Around, step: str) -> int:
        """The site of what the stages of a pipeline, or its tail, find of an operand."""
        assert node.inside is not None
        n = node.inside.inputs[p]
        free = self.of_node[id(n)] = self.free(where, around, step=step, tensor=n.tensors[0], of=n, places=[(id(node), p)])
        site = self.sites[free]
        site.flows = (self.flow(Value(n)),)
        site.staged = Choice("staged", (outside_state(node, p),), (inside_state(node, p),), 0, 0.0)
        site.sends, site.returns = (around.times * times for times in sends(node, p, self.flow))
        schedule, ends = schedule_of(node), ends_of(node)
        pieces = 1 if p in ends.constants else schedule.rounds if p in ends.sampled else schedule.slots
        self.flying[free] = pieces * in_flight(node, p, self.flow)
        self.operands[id(node), p] = (*self.operands.get((id(node), p), ()), free)
        return free

    def on_stages(self, node: Node, first: int, entries: Collection[int]) -> None:
        """Gives sites inside of a pipeline, or its tail, the one choice that they have along its axes."""
        choices = staged(node)
        self.enclose(first, names_of(node), entries)
        for site in self.sites[first:]:
            if site.node is not None:
                site.staged = choices[id(site.node)]
            elif site.staged is None:  # a copy that users share
                site.staged = self.copied(site)

    def enclose(self, first: int, names: tuple[str, ...], entries: Collection[int]) -> None:
        """Puts all sites from the first on inside of control flow that devices along these axes do not take together.

        `entries`: the sites through which values come in; the first operand of each changes its type before that.
        """
        for s, site in enumerate(self.sites[first:], first):
            outside = 1 if s in entries else 0
            inside = (replace(port, apart=(*port.apart, *names)) for port in site.ports[outside:])
            site.along, site.ports = names, [*site.ports[:outside], *inside]

    def branches(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """All branches side by side; along the axes of the groups everything inside is replicated."""
        assert node.inside is not None
        first, inner = len(self.sites), around.beside(branches.weight_of(node))
        given, found = list[Where](), list[Where]()
        self.grouped(node)
        for p, (where, n) in enumerate(zip(operands, node.inside.inputs, strict=True)):
            free = self.free(where, around, step="in" if p in branches.packed_of(node) else "", tensor=n.tensors[0], of=n)
            self.sites[free].flows = (self.flow(Value(n)),)
            self.sites[free].staged = Choice("replicated", (branches.outside_state(node, p),), (REPLICATED,), 0, 0.0)
            self.of_node[id(n)] = free
            self.operands[id(node), p] = (*self.operands.get((id(node), p), ()), free)
            given.append((free, 0))
        for q, where in enumerate(self.graph(node.inside, given, inner)):
            free = self.free(where, around, of=node)
            self.sites[free].staged = Choice("partial", (REPLICATED,), (PARTIAL,), 0, 0.0)
            self.outputs[id(node.inside), q] = (free,)
            found.append((free, 0))
        self.enclose(first, branches.names_of(node), [s for s, _ in given])
        for site in self.sites[first:]:
            site.staged = site.staged or branches.everywhere(site.node, len(site.ports), len(site.results))
        self.results[id(node)] = tuple(found)
        return found

    def stages(self, node: Node, operands: list[Where], around: Around) -> list[Where]:
        """All stages side by side, of what a step finds. What stands for all their results makes these of one type."""
        assert node.inside is not None
        self.grouped(node)
        found = self.graph(node.inside, operands, around.beside(branches.weight_of(node)))
        self.results[id(node)] = tuple(found)
        return found

    def grouped(self, node: Node) -> None:
        """Notes the group of every operator of branches, or stages."""
        for k, group in enumerate(branches.groups_of(node)):
            self.groups.update((id(n), k) for n in group.graph.nodes)

    def through(self, carry: int, end: Port, stack: Tensor) -> None:
        """Ends a pipeline's carry. Its operands: what comes in, stacked, and a step's end. Its results: a step's start, and what
        goes out, stacked."""
        site = self.sites[carry]
        assert site.staged is not None
        (whole,), (slice_,) = site.staged.operands, site.staged.results
        site.staged = Choice("staged", (whole, slice_), (slice_, whole), 0, 0.0)
        site.ports.append(end)
        site.results = (*site.results, stack)
        site.flows = (*site.flows, *site.flows)
        site.stored = [*site.stored, 0.0]

    def copied(self, site: Site) -> Choice:
        """Along stage axes a copy is what it is a copy of."""
        (port,) = site.ports
        made = self.sites[port.source].staged
        assert made is not None
        state = made.results[port.index]
        return Choice("staged", (state,), (state,), 0, 0.0)
