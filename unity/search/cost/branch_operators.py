"""The operators in the branches of a conditional (`lax.cond`, `lax.switch`), with their runs.

A branch is captured as a graph, as a whole program is. So its checkpoints are recomputed, its loops repeated, and its operators
fused by the rules that hold outside of conditionals. A call with a derivative rule, in whose program there is a conditional, is a
conditional of one branch: its program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from unity.pcg.analysis.stacked_values import StackingKernels
from unity.pcg.capture.capture import graph_of
from unity.pcg.ir.gradient_flow import carrying, with_gradient
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import BRANCHED, CALLS
from unity.pcg.propagation.nested.programs import branch_indices, branches, nested_body, nests
from unity.pcg.types.parallel_type import Shape
from unity.search.cost.operator_runs import OperatorRuns, operator_runs, program_facts


@dataclass(frozen=True)
class BranchOperator:
    """An operator in a branch of a conditional.

    Args:
        body: Its program.
        shapes: The shapes of its operands and results.
        differentiated: For each operand, whether it has a gradient.
        forward: Runs in the forward pass.
        again: Forward runs that the backward pass repeats.
        backward: Backward runs.
        stacking: The kernels that write its rows of stacked values.
    """

    body: Body
    shapes: tuple[Shape, ...]
    differentiated: tuple[bool, ...]
    forward: int
    again: int
    backward: int
    stacking: StackingKernels


Branch = tuple[BranchOperator, ...]


@lru_cache(maxsize=65536)
def conditionals(body: Body, differentiated: tuple[bool, ...]) -> tuple[tuple[Branch, ...], ...]:
    """Return the operators of each branch of each conditional in an operator's program.

    Args:
        body: The program.
        differentiated: For each operand, whether it has a gradient.
    """
    alternatives = [(e, _alternatives(e)) for e in body.equations]
    if not any(programs for _, programs in alternatives):
        return ()
    results = tuple(isinstance(a, int) and body.tensors[a].floating for a in body.outputs)
    carried = carrying(body, differentiated, results) if any(differentiated) else frozenset[int]()
    return tuple(tuple(_operators(program, e, carried) for program in programs) for e, programs in alternatives if programs)


def _alternatives(equation: Equation) -> tuple[Body, ...]:
    """Return the branches of a conditional, or the program of a call with a conditional inside; nothing for other equations."""
    if equation.name in BRANCHED:
        return branches(equation)
    return (nested_body(equation),) if equation.name in CALLS and has_conditional(nested_body(equation)) else ()


@lru_cache(maxsize=65536)
def has_conditional(body: Body) -> bool:
    """Return whether a program has a conditional, also in programs nested in it."""
    return any(e.name in BRANCHED or (nests(e) and has_conditional(nested_body(e))) for e in body.equations)


def is_measured_in_every_branch(body: Body) -> bool:
    """Return whether a measurement of an operator chooses the branches of all its conditionals.

    It does so by their indices among the operands. A call with a derivative rule computes the index inside.
    """
    indices = branch_indices(body)
    return all(e.name in BRANCHED and e.operands[0] in indices for e in body.equations if _alternatives(e))


def _operators(branch: Body, conditional: Equation, carried: frozenset[int]) -> Branch:
    """Return the operators of one branch; a gradient flows through the `carried` variables around the conditional."""
    graph = graph_of(branch, [f"operand {k}" for k in range(len(branch.inputs))])
    operands = conditional.operands[len(conditional.operands) - len(branch.inputs) :]  # without the index
    cotangents = {k for k, v in enumerate(conditional.results) if v in carried}
    active = {k for k, a in enumerate(operands) if cotangents and isinstance(a, int) and a in carried}
    facts = program_facts(graph, active, cotangents)

    def operator(runs: OperatorRuns) -> BranchOperator:
        shapes = tuple(v.tensor.shape for v in (*runs.node.operands, *runs.node.results))
        flags = with_gradient(runs.node, facts.flow)
        return BranchOperator(runs.body, shapes, flags, runs.first, runs.runs - runs.first, runs.count, runs.stacking)

    return tuple(map(operator, operator_runs(graph, facts)))
