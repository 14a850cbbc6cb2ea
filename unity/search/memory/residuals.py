"""What the operators of one graph keep for the backward pass, on one device, and in whose memory that lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.analysis.hoisting import kept_once
from unity.pcg.analysis.rematerialization import runs_again
from unity.pcg.analysis.residuals import Residuals
from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import LOOPS, PARALLELIZATION, PCG, STAGES, Node, Value
from unity.search.memory.backend import Backend
from unity.search.memory.inner_values import Inner, inner_of
from unity.search.space.live_buffers import BACKEND, CHANGED, KEPT, WIDENED, Held, Lying

AS_MADE, TURNED = "as made", "turned"


@dataclass(frozen=True)
class Setting:
    """What is the same for all graphs of a program: where gradients flow, whether it is trained, and what compiles it."""

    program: PCG
    flow: Gradients
    training: bool
    backend: Backend

    @cached_property
    def kept_once(self) -> Mapping[int, int]:
        """Of which nodes in scans so many times less is kept than in every step (`pcg.hoisting.kept_once`)."""
        return kept_once(self.program)


class Keeper:
    """A graph, or one inside a scan or a remat, and what is kept of it so far: operators are asked in order (`kept_by`, `need`)."""

    def __init__(self, graph: PCG, setting: Setting, around: str = "", stacked: bool = False) -> None:
        """`around`: the kind of node that the graph is inside of. `stacked`: what it keeps is handed out in arrays, as a loop's
        step does."""
        self.graph, self.setting = graph, setting
        self.flow, self.training, self.backend = setting.flow, setting.training, setting.backend
        self.top, self.stacked = not around, stacked or around in LOOPS or around == STAGES
        self.looped = around in LOOPS
        self.lying = Lying(graph)
        self.nbytes = self.lying.nbytes
        self.inputs = {id(node): k for k, node in enumerate(graph.inputs)}
        self.own_bytes = {v: n if self.counts(v) else 0.0 for v, n in self.nbytes.items()}
        self.chosen: dict[Value, None] = {}  # what is kept, in the order in which that is found
        self.wide: set[Value] = set()  # those that are kept wider
        self.forms: dict[Value, set[str]] = {}  # in which orders of dimensions they are kept
        self.needs: set[int] = set()  # inputs that the backward pass needs
        self.steps = 0.0  # bytes that are kept, added up

    def counts(self, v: Value) -> bool:
        """Whether a value, or its cotangent, takes memory of its own: arguments and their gradients are counted already."""
        return not (self.top and id(v.node) in self.inputs) and (self.flow(v) or not self.training)

    def need(self, v: Value, reader: Node | None = None) -> list[Held]:
        """Keeps a value as it is where it was last moved, if it is not kept yet; for some readers, wider, or turned."""
        wide = (self.looped and self.backend.narrow(v.tensor)) or (reader is not None and self.backend.widens(reader, v))
        turned = reader is not None and self.backend.turned(reader, v) and not self.argument(v) and not self.waits(reader)
        v = self.lying.kept[v]
        if runs_again(v.node):
            return [h for w in v.node.operands for h in self.need(w)]
        form = TURNED if turned else AS_MADE
        more = [self.held(WIDENED, v.node, self.local(v))] if wide and v not in self.wide else []
        self.wide |= {v} if wide else set()
        if v in self.chosen:
            more += [self.held(BACKEND, v.node, self.local(v))] if form not in self.forms[v] else []
            self.forms[v] |= {form}
            return more
        self.chosen[v], self.forms[v] = None, {form}
        if id(v.node) in self.inputs:
            self.needs.add(self.inputs[id(v.node)])
            return more
        why = CHANGED if v.node.kind in PARALLELIZATION else KEPT
        return [self.count(self.held(why, v.node, self.local(v))), *more]

    def local(self, v: Value) -> float:
        """Bytes of one of the graph's values on one device."""
        return self.nbytes[v]

    def count(self, held: Held) -> Held:
        self.steps += held.nbytes
        return held

    def held(self, why: str, node: Node, nbytes: float) -> Held:
        """What each run keeps of a node: its part, if that is made once for several."""
        return Held(why, node, nbytes / self.setting.kept_once.get(id(node), 1))

    def inner(self, node: Node) -> Inner:
        """Where the inner values of an operator lie."""
        assert node.body is not None
        return inner_of(node.body, tuple(v.type for v in node.operands), node.types, self.graph.axes)

    def flows(self, node: Node) -> tuple[bool, ...]:
        """For each operand, whether a gradient flows back to it."""
        return tuple(map(self.flow, node.operands))

    def kept_by(self, node: Node, found: Residuals, inner: Inner) -> list[Held]:
        """What an operator keeps. `found`: what its backward pass needs. What halos extend is kept so, and not as it was made."""
        if not (self.training and any(map(self.flow, node.results))):
            return []
        kept: list[Held] = []
        extended = (*inner.extended, *(0.0 for _ in node.results))
        for v, flag, nbytes in zip((*node.operands, *node.results), found.operands + found.results, extended, strict=True):
            if not flag or (v.node is node and runs_again(node)) or self.backend.knows(node):
                continue
            kept += self.extended(v, node, nbytes) if nbytes else self.need(v, node)
        if node.attributes.get("again"):
            return kept
        for (variable, _), nbytes in zip(found.inner, inner.kept(self.flows(node), self.stacked)[1], strict=True):
            kept.append(self.count(self.held(KEPT, node, nbytes)))
            if self.looped and self.backend.narrow(inner.body.tensors[variable]):
                kept.append(self.held(WIDENED, node, nbytes))
        return kept

    def extended(self, v: Value, reader: Node, nbytes: float) -> list[Held]:
        """Keeps an operand as halos extend it, to so many bytes. If the reader runs again, what has arrived is kept alone, beside
        the operand as it was made."""
        if not self.waits(reader):
            return [self.count(self.held(CHANGED, reader, nbytes))]
        return [*self.need(v, reader), self.count(self.held(CHANGED, reader, nbytes - self.local(v)))]

    def waits(self, node: Node) -> bool:
        """Whether some operand of an operator is made again for its backward pass. Then it reads all of them when that comes."""
        kept = [self.lying.kept[v] for v in node.operands]
        return any(runs_again(base.node) for base in kept) or kept != [self.lying.unmoved[v] for v in node.operands]

    def made_again(self, node: Node) -> float:
        """Bytes of the inner values of an operator that are not kept, when its own backward pass comes; nor stacked, in a loop."""
        if not node.attributes.get("again"):
            return 0.0
        return sum(self.inner(node).kept(self.flows(node), False)[1])

    def made_for(self, node: Node) -> float:
        """Bytes that are there when an operator's own backward pass comes because operands of it are made again as a whole."""
        total = 0.0
        for v in node.operands:
            made = self.lying.kept[v]
            if runs_again(made.node):
                total += self.local(made) if self.lying.unmoved[v] != made else 0.0
                total += self.made_again(made.node) + self.made_for(made.node)
        return total

    def there(self, v: Value) -> bool:
        """Whether a value is held anyway: an argument, or kept, and not gathered again."""
        return self.lying.unmoved[v] in self.chosen or self.argument(v)

    def argument(self, v: Value) -> bool:
        """Whether a value lies in an argument's memory."""
        return self.top and id(self.lying.unmoved[v].node) in self.inputs
