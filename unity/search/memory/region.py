"""The memory of one graph, of the whole program or inside a node, from what its nodes add: sums, and the peak."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.ir.graph import LOOPS, PCG, Node, Value
from unity.search.memory.backend import ACCUMULATING
from unity.search.memory.eager_forward import Forward, changes_at_start
from unity.search.memory.live_through import live_through
from unity.search.memory.operator_memory import OperatorMemory
from unity.search.memory.peak import ReusableGradient, Turns
from unity.search.memory.residuals import ResidualCollector
from unity.search.space.live_buffers import GRADIENTS, REUSED, WIDENED, WORKING, Buffer, whole

FORWARD, BACKWARD = "forward", "backward"
Turn = tuple[str, int]  # the pass, and the number of the operator whose turn it is; -1 before any
NOTICED = 1e-3  # relative to all gradients: the memory of smaller ones is not considered for reuse


@dataclass(frozen=True, eq=False)
class Region:
    """The memory of a graph on one device.

    Attributes:
        residuals: the residuals of the graph, and the sizes of its values.
        operators: what each node adds, in order.
        inside: the memory of the graphs nested in nodes, other than branches, by id(node).
        always: the buffers that are live throughout the step.
    """

    residuals: ResidualCollector
    operators: Sequence[OperatorMemory]
    inside: dict[int, Region]
    always: Collection[Buffer] = ()

    @property
    def graph(self) -> PCG:
        """The graph."""
        return self.residuals.graph

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes of the graph without its inputs."""
        return self.residuals.nodes

    def local(self, v: Value) -> float:
        """Return the bytes of one of the graph's values on one device."""
        return self.residuals.local(v)

    @property
    def needs(self) -> Collection[int]:
        """The inputs that the backward pass needs."""
        return self.residuals.needs

    @property
    def residual_bytes(self) -> float:
        """The bytes of all residuals."""
        return self.residuals.residual_bytes

    @cached_property
    def kept(self) -> tuple[Buffer, ...]:
        """The residuals of all nodes."""
        return tuple(h for operator in self.operators for h in operator.kept)

    @cached_property
    def saved(self) -> tuple[tuple[int, Buffer], ...]:
        """The values that policies of remats around the graph save, each with the depth of the outermost such remat."""
        return tuple(each for operator in self.operators for each in operator.saved)

    @cached_property
    def offloaded(self) -> tuple[Buffer, ...]:
        """The values that policies save in the memory of the host."""
        return tuple(h for operator in self.operators for h in operator.offloaded)

    @property
    def fetched(self) -> float:
        """The bytes of offloaded values that the graph's own operators read."""
        return sum(operator.fetched for operator in self.operators)

    @property
    def invariant(self) -> float:
        """The bytes of values that derivatives read and that depend on no operand."""
        return sum(operator.invariant for operator in self.operators)

    @property
    def momentary(self) -> float:
        """The bytes of residuals inside nodes that are not live beside others, as one remat is open at a time."""
        return sum(operator.momentary for operator in self.operators)

    @property
    def zeros_inside(self) -> float:
        """The bytes of zeros inside of a remat that are live from the start of the program."""
        return sum(operator.zeros_inside for operator in self.operators)

    @property
    def computes_ahead(self) -> bool:
        """Whether the backend computes values ahead of their turn, so that the peak may be in the forward pass."""
        return self.residuals.nesting.outermost and self.residuals.backend.eager

    @cached_property
    def forward(self) -> dict[int, float]:
        """The bytes of working sets in the forward pass, by the number of the operator; some have none there."""
        return {i: operator.forward for i, operator in enumerate(self.operators) if operator.forward is not None}

    @cached_property
    def live_through(self) -> Sequence[float]:
        """The bytes that are live at each turn because others read them later."""
        at_end = () if self.residuals.nesting.outermost else self.graph.outputs
        return live_through(self.nodes, self.residuals.own_bytes, at_end)

    @property
    def peak(self) -> list[Buffer]:
        """The buffers that are live at the peak."""
        return self._highest[0]

    @property
    def peak_turn(self) -> Turn:
        """The turn at which the peak is."""
        return self._highest[1]

    @cached_property
    def _highest(self) -> tuple[list[Buffer], Turn]:
        """The buffers that are live at the peak, and the turn at which that is.

        Live are the residuals of the operators before that turn, as those after it have run backward, and the operator's working
        set. A scan's stacks are live from the start of the forward pass, which is swept too if the backend computes values ahead.
        """
        backward = self.backward_turns()
        highest, live = backward.highest(), list[Buffer]()
        at = -1 if highest is None else highest[0]
        if highest is not None:
            live = [h for i, k in enumerate(self.operators) for h in k.kept if i <= at or backward.early[i]]
            live += [*self.operators[at].working, Buffer(WORKING, self.nodes[at], self.live_through[at])]
            live += self._reused(backward.reused(at, backward.own[at]))
        turn = (BACKWARD, at) if at >= 0 else (FORWARD, -1)
        if not self.computes_ahead:
            return live, turn
        forward = self.forward_turns()
        at_forward, aliases = forward.highest()
        working = [Buffer(WORKING, self.nodes[at_forward], self.forward[at_forward])] if at_forward in self.forward else []
        before = [*forward.held(at_forward), *working, *self._reused(aliases)]
        return max((live, turn), (before, (FORWARD, at_forward)), key=lambda peak: sum(h.nbytes for h in peak[0]))

    def backward_turns(self) -> Turns:
        """Return the bytes that are live at each operator's turn in the backward pass, or, without gradients, in the only pass."""
        early = [node.kind in LOOPS and not (self.computes_ahead and self.residuals.training) for node in self.nodes]
        own = [[*(h.nbytes for h in k.working), n] for k, n in zip(self.operators, self.live_through, strict=True)]
        return Turns([[h.nbytes for h in k.kept] for k in self.operators], early, own, self._reusable[1])

    def forward_turns(self) -> Forward:
        """Return the buffers at each operator's turn in the forward pass: residuals, values ahead of their turn, working sets."""
        ahead = [each for operator in self.operators for each in operator.ahead] if self.computes_ahead else []
        changed = changes_at_start(self.nodes, self.residuals.aliases, self.residuals.chosen) if self.computes_ahead else []
        at_once = [[h for h in k.kept if k.node.kind in LOOPS and h.why != WIDENED] for k in self.operators]
        in_turn = [[h for h in k.kept if k.node.kind not in LOOPS or h.why == WIDENED] for k in self.operators]
        return Forward(in_turn, at_once, [*ahead, *changed], self.forward, self._reusable[1])

    def _reused(self, places: list[tuple[int, float]]) -> list[Buffer]:
        """Return the bytes that reuse the memory of gradients that are not yet computed, as negative buffers."""
        return [Buffer(REUSED, self._reusable[0][k], -nbytes) for k, nbytes in places]

    @cached_property
    def _reusable(self) -> tuple[list[Node], list[ReusableGradient]]:
        """The weights whose gradients' memory may be reused, and those gradients, largest first."""
        buffers = {id(h.node): h for h in self.always if h.why == GRADIENTS}
        least = NOTICED * sum(h.nbytes for h in buffers.values())
        first: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            for v in node.operands:
                first.setdefault(id(v.node), i)
                if node.kind in ACCUMULATING and self.residuals.backend.eager:
                    first[id(whole(v).node)] = len(self.nodes)  # the zeros that a gradient is accumulated from are live early
        large = sorted((h for h in buffers.values() if h.nbytes > least), key=lambda h: h.nbytes, reverse=True)
        return [h.node for h in large], [ReusableGradient(h.nbytes, first.get(id(h.node), -1)) for h in large]
