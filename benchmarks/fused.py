"""Algebra first, as Unity's section 6.4 has it: what an algebraic optimizer has fused stays one operator.

A restriction on the sequential candidate, and our reading of the paper: a product or convolution whose result goes into a function
of elements has no partial sums, so that what it sums over is not split; a join of looked-up rows is whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.capture import Captured
from unity.pcg.choices import Choice
from unity.pcg.graph import Node
from unity.pcg.state import PARTIAL
from unity.rewriting import Rewriter, budget_of
from unity.search.cost import Training
from unity.search.dimensions import Dimensions
from unity.search.machine import Machine
from unity.search.masks import Along, Mask
from unity.search.pricing import Prices
from unity.search.session import Search

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


def join(node: Node, users: Mapping[int, list[Node]]) -> bool:
    """Whether an operator joins rows that were looked up."""
    return "concatenate" in primitives(node)


def without_partial_sums(choice: Choice) -> bool:
    return PARTIAL not in choice.states


def whole(choice: Choice) -> bool:
    return all(state.kind in "UR" for state in choice.states)


def algebra_first(captured: Captured, machine: Machine, training: Training) -> Captured:
    """The program that is the fastest on one of a machine's devices."""
    chosen = Rewriter(None, budget_of(None)).best(captured, Prices(machine.alone, training), lambda stage: None)
    return captured if chosen is None else chosen.after


@dataclass(frozen=True)
class Restricted:
    """A program's best strategy on a machine where fused operators have only such choices as `left`."""

    program: Captured
    machine: Machine
    training: Training
    fused: Fused
    left: Callable[[Choice], bool]

    @cached_property
    def search(self) -> Search:
        program = self.program
        return Search(program.graph, program.differentiated, self.machine, self.training, restrict=self._masks)

    @cached_property
    def operators(self) -> int:
        """How many operators are fused."""
        return sum(self.fused(node, self._users) for node in self.program.graph.nodes)

    @cached_property
    def _users(self) -> Mapping[int, list[Node]]:
        users: dict[int, list[Node]] = {}
        for node in self.program.graph.nodes:
            for v in node.operands:
                users.setdefault(id(v.node), []).append(node)
        return users

    def _masks(self, dimensions: Dimensions, machine: Machine) -> Mapping[int, Mask]:
        axes = tuple(range(len(machine.axes)))
        return {
            s: (Along(axes, frozenset(c.states for c in dimensions.found[s] if self.left(c))),)
            for s, site in enumerate(dimensions.opened.sites)
            if site.node is not None and self.fused(site.node, self._users)
        }
