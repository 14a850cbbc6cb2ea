"""Algebra first, as Unity's section 6.4 has it: what an algebraic optimizer has fused stays one operator.

Two restrictions on the sequential candidate, our reading of the paper: a product or convolution whose result goes into a function
of elements has no partial sums, so that what it sums over is not split; and what is concatenated is split over samples only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.graph import Node
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.parallel_type import PARTIAL
from unity.search.cost.cost import Training
from unity.search.joint.pricing import Prices
from unity.search.session import Search
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Along, Mask
from unity.transforms.rewriting import Rewriter, budget_of

PRODUCTS = {"dot_general", "conv_general_dilated"}
ELEMENTS = {"max", "custom_jvp_call", "tanh", "logistic", "erf", "relu", "gelu"}  # primitives, or what an operator is called
BIAS = {"add", "broadcast_in_dim", "reshape", "convert_element_type"}  # of an operator that changes no more than this

Fused = Callable[[Node, Mapping[int, list[Node]]], bool]  # an operator, and all operators' users


def primitives(node: Node) -> frozenset[str]:
    return frozenset(node.body.primitives) if node.body is not None else frozenset()


def product_before_elements(node: Node, users: Mapping[int, list[Node]]) -> bool:
    """Whether a product's result goes into a function of elements, with a bias added or not."""
    return not PRODUCTS.isdisjoint(primitives(node)) and _goes_into_elements(node, users)


def _goes_into_elements(node: Node, users: Mapping[int, list[Node]]) -> bool:
    for user in users.get(id(node), ()):
        inside = primitives(user)
        if user.kind in ELEMENTS or ("softmax" not in user.kind and inside <= ELEMENTS | BIAS and not ELEMENTS.isdisjoint(inside)):
            return True
        if inside <= BIAS and _goes_into_elements(user, users):
            return True
    return False


def concatenation(node: Node, users: Mapping[int, list[Node]]) -> bool:
    return "concatenate" in primitives(node)


def without_partial_sums(choice: Choice) -> bool:
    return PARTIAL not in choice.states


def by_samples(choice: Choice) -> bool:
    """Whether nothing but the first dimension is split."""
    return all(state.kind in "UR" or (state.kind == "P" and state.dim == 0) for state in choice.states)


@dataclass(frozen=True)
class Restriction:
    """Operators that are fused, and the choices that are left to them."""

    fused: Fused
    left: Callable[[Choice], bool]


AS_PUBLISHED = (Restriction(product_before_elements, without_partial_sums), Restriction(concatenation, by_samples))


def algebra_first(captured: Captured, machine: Machine, training: Training) -> Captured:
    """The program that is the fastest on one of a machine's devices."""
    chosen, _ = Rewriter(None, budget_of(None)).best(captured, Prices(machine.alone, training), lambda stage: None)
    return captured if chosen is None else chosen.after


@dataclass(frozen=True)
class Restricted:
    """A program's best strategy on a machine where fused operators have only the choices that are left to them."""

    program: Captured
    machine: Machine
    training: Training
    restrictions: Sequence[Restriction] = AS_PUBLISHED

    @cached_property
    def search(self) -> Search:
        program = self.program
        return Search(program.graph, program.differentiated, self.machine, self.training, restrict=self._masks)

    @cached_property
    def operators(self) -> int:
        """How many operators are fused."""
        return sum(any(self._of(node)) for node in self.program.graph.nodes)

    @cached_property
    def _users(self) -> Mapping[int, list[Node]]:
        users: dict[int, list[Node]] = {}
        for node in self.program.graph.nodes:
            for v in node.operands:
                users.setdefault(id(v.node), []).append(node)
        return users

    def _of(self, node: Node) -> list[Restriction]:
        return [r for r in self.restrictions if r.fused(node, self._users)]

    def _masks(self, dimensions: ProgramDimensions, machine: Machine) -> Mapping[int, Mask]:
        axes = tuple(range(len(machine.axes)))
        return {
            s: tuple(Along(axes, frozenset(c.states for c in dimensions.choices[s] if r.left(c))) for r in restrictions)
            for s, site in enumerate(dimensions.opened.sites)
            if site.node is not None and (restrictions := self._of(site.node))
        }
