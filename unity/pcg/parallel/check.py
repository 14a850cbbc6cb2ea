"""The type checker of parallel graphs: every application of an operator must be one that the operator table allows.

JAX does not check this: it silently applies a relu to a partial sum, which is wrong.

The checker also rules out hangs. Devices along the axes of a pipeline, or of branches, do not run the nested graph together: one
stage idles while another works. A collective along such an axis would wait for devices that never arrive, so nothing inside
communicates along it, forward or backward. A collective-permute involves all devices of the program, whoever sends to whom: XLA's
CPU runtime waits for all of them. So no operator inside exchanges halos, along any axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity.base.errors import ParallelTypeError
from unity.pcg.ir.graph import (
    BRANCHES,
    LOOPS,
    PARALLELIZATION,
    PCG,
    PIPELINE,
    STAGES,
    TAIL,
    THROUGH,
    Node,
    Value,
    carried_by,
    reserved_axes,
)
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.branches import check_boundary_types
from unity.pcg.parallel.resharding import absolute, kind_of, stationary
from unity.pcg.parallel.stages import ends_of, inside_state, outside_state, stacked_state, stage_axes
from unity.pcg.propagation.choice import choice_of
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.halos import halo_edges
from unity.pcg.propagation.placement import placed
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, State, Type, misfit, show


def check(graph: PCG) -> None:
    """Raise ParallelTypeError, with operator, operand, dimension and axis, unless all types of a parallel graph agree."""
    for k, v in enumerate(graph.outputs):
        for state, axis in zip(v.type, graph.axes, strict=True):
            if state.kind in "RS" or state.outer > 1:
                raise ParallelTypeError(
                    f'{_where(v.node)}: output {k} of the graph is {_words(state)} along axis "{axis.name}": it cannot leave the'
                    " program so.\n    Reduce or combine it first. (docs: types#changes)"
                )
    _check_graph(graph, {})


def check_by_names(graph: PCG, names: AxisNames) -> None:
    """Check a parallel graph like `check`, with the names of axes that users see in the error."""
    try:
        check(graph)
    except ParallelTypeError:
        check(names.run_graph(graph))
        raise


# Axes, by position, along which devices do not run a graph together, each with the operator that the graph is nested in.
Divergent = Mapping[int, Node]


def _check_graph(graph: PCG, divergent: Divergent) -> None:
    for node in graph.nodes:
        for v in node.results:
            _check_divisibility(node, v, graph.axes)
        if node.kind in PARALLELIZATION:
            _check_change(node, graph.axes)
            _check_change_is_local(node, graph.axes, divergent)
        elif node.inside is not None:
            _check_nested(node, graph.axes, divergent)
        elif node.kind != "input":
            _check_application(node, graph.axes)
            _check_application_is_local(node, graph.axes, divergent)


def _where(node: Node) -> str:
    return f"{node.source or 'the graph'}: {node.kind}"


def _words(state: State) -> str:
    if state.kind != "P":
        return {"U": "unused", "R": "replicated for use", "S": "a partial sum"}[state.kind]
    return f"partitioned in dimension {state.dim}" + (f" at inner digit {state.outer}" if state.outer > 1 else "")


def _check_divisibility(node: Node, v: Value, axes: tuple[Axis, ...]) -> None:
    if len(v.type) != len(axes):
        raise ParallelTypeError(f"{_where(node)}: result {v.index} has a type of {len(v.type)} axes on a mesh of {len(axes)}")
    problem = misfit(v.tensor.shape, v.type, axes)
    if problem:
        raise ParallelTypeError(f"{_where(node)}: result {v.index}: {problem}. (docs: types#divisibility)")


def _check_change(node: Node, axes: tuple[Axis, ...]) -> None:
    (operand,) = node.operands
    before, after = absolute(operand.type, axes), absolute(node.types[0], axes)
    for axis, s, t in zip(axes, before, after, strict=True):
        if s != t and (node.kind == "view" or kind_of(s, t) != node.kind):
            raise ParallelTypeError(
                f'{_where(node)}: along axis "{axis.name}" it changes {_words(s)} to {_words(t)}, which is'
                f" {kind_of(s, t) or 'no operator at all'}. (docs: types#changes)"
            )


def _check_change_is_local(node: Node, axes: tuple[Axis, ...], divergent: Divergent) -> None:
    """Raise ParallelTypeError if a parallelization operator changes a state along an axis whose devices do not run it together."""
    before, after = (absolute(v.type, axes) for v in (*node.operands, *node.results))
    for k, around in divergent.items():
        if not stationary(before[k], after[k]):
            raise _hang(node, f"changes {_words(before[k])} to {_words(after[k])}", axes[k], around)


def _check_application_is_local(node: Node, axes: tuple[Axis, ...], divergent: Divergent) -> None:
    """Raise ParallelTypeError if an operator communicates with devices that do not run it.

    It may not reduce or agree on a number along a divergent axis, nor exchange halos along any axis if there is a divergent one.
    """
    assert node.body is not None
    for k, axis in enumerate(axes if divergent else ()):
        solution = placed(node.body, tuple(v.type[k] for v in node.operands), tuple(t[k] for t in node.types))
        if solution is not None and halo_edges(node.body, solution):
            raise _hang(node, "exchanges halos, by collective-permutes of all devices,", axis, next(iter(divergent.values())))
        if k in divergent and solution is not None and solution.communicates:
            raise _hang(node, "reduces, or agrees on a number,", axis, divergent[k])


def _hang(node: Node, action: str, axis: Axis, around: Node) -> ParallelTypeError:
    """Return the error for an operator that would wait for devices which do not run it.

    Args:
        node: the operator.
        action: a verb phrase for the communication.
        axis: the axis along which it communicates.
        around: the pipeline or branches that it is nested in.
    """
    where = f" at {around.source}" if around.source else ""
    along = " ".join(reserved_axes(around))
    return ParallelTypeError(
        f'{_where(node)}: along axis "{axis.name}" it {action} inside of the {around.kind}{where}. Its devices along {along} do not'
        f" run it together: those that do would wait for the others for ever.\n    Communicate outside of the {around.kind}, and"
        " keep all types along its axes inside; a plan file of an older version must be made again. (docs: types#control-flow)"
    )


def _divergent_axes(node: Node, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """Return the axes, by position, along which devices do not run a node's nested graph together."""
    if node.kind in (PIPELINE, TAIL):
        return stage_axes(node, axes)
    if node.kind in (BRANCHES, STAGES):
        names = reserved_axes(node)
        return tuple(k for k, axis in enumerate(axes) if axis.name in names)
    return ()


def _check_nested(node: Node, axes: tuple[Axis, ...], divergent: Divergent) -> None:
    assert node.inside is not None
    graph = node.inside
    for k in _divergent_axes(node, axes):
        if k in divergent and node.kind in (PIPELINE, TAIL):
            raise _hang(node, "hands samples from stage to stage", axes[k], divergent[k])
    if node.kind in (PIPELINE, TAIL):
        _check_stages(node, axes)
    if node.kind == BRANCHES:
        check_boundary_types(node, axes)
    if node.kind in THROUGH:
        boundary = [*zip(node.operands, map(Value, graph.inputs), strict=True), *zip(node.results, graph.outputs, strict=True)]
        for k, (v, w) in enumerate(boundary):
            if v.type != w.type:
                name = f"operand {k}" if k < len(node.operands) else f"result {k - len(node.operands)}"
                outside, inside = (show(x.type, axes, x.tensor.ndim) for x in (v, w))
                raise ParallelTypeError(f"{_where(node)}: {name} is {outside} outside and {inside} inside. (docs: types#changes)")
    if node.kind in LOOPS:
        for k, p in enumerate(carried_by(node)):
            start, end = graph.inputs[p].types[0], graph.outputs[k].type
            if start != end:
                rank = graph.outputs[k].tensor.ndim
                raise ParallelTypeError(
                    f"{_where(node)}: carry {k} goes in as {show(start, axes, rank)} and comes out as {show(end, axes, rank)}:"
                    " every step must find it as the first did"
                )
    _check_graph(graph, {**dict.fromkeys(_divergent_axes(node, axes), node), **divergent})


def _check_stages(node: Node, axes: tuple[Axis, ...]) -> None:
    """Check the boundary types of a pipeline or its tail.

    Along the stage axes, operands and results must have the states in which stages store and receive them. Along other axes they
    must have the states that they have in a step. The check of the nested graph shows that steps treat samples independently.
    """
    assert node.inside is not None
    over, carried = stage_axes(node, axes), ends_of(node).carried
    for p, (v, n) in enumerate(zip(node.operands, node.inside.inputs, strict=True)):
        _check_boundary(node, f"operand {p}", v, n.types[0], p, over, axes)
    if node.kind == TAIL:
        _check_sums(node, over, axes)
        return
    for k, (outside, inside) in enumerate(zip(node.results, node.inside.outputs, strict=True)):
        _check_boundary(node, f"result {k}", outside, inside.type, carried[k], over, axes)


def _check_sums(node: Node, over: tuple[int, ...], axes: tuple[Axis, ...]) -> None:
    """Check the results of a tail: each is a sum over the samples, of which every stage has a part."""
    assert node.inside is not None
    for k, (outside, inside) in enumerate(zip(node.results, node.inside.outputs, strict=True)):
        for s, t, (i, axis) in zip(outside.type, inside.type, enumerate(axes), strict=True):
            if s != t or (i in over and t != PARTIAL):
                raise ParallelTypeError(
                    f'{_where(node)}: along axis "{axis.name}" result {k} is {_words(s)} and {_words(t)} for'
                    " a micro-batch, but a tail adds up micro-batches, and along its stages all have a part of the sum."
                    " (docs: pipelines#types)"
                )


def _check_boundary(
    node: Node, name: str, v: Value, step: Type, position: int, over: tuple[int, ...], axes: tuple[Axis, ...]
) -> None:
    """Check one operand or result of a pipeline or its tail.

    Args:
        node: the pipeline or tail.
        name: the operand or result in words.
        v: the value outside.
        step: its type in a step.
        position: the position of the operand, or of the carried operand that the result continues.
        over: the stage axes.
        axes: the mesh.
    """
    stacked = position not in ends_of(node).constants
    for k, axis in enumerate(axes):
        expected = stacked_state(step[k]) if stacked else step[k], step[k]
        if k in over:
            expected = outside_state(node, position), inside_state(node, position)
        if (v.type[k], step[k]) != expected:
            raise ParallelTypeError(
                f'{_where(node)}: along axis "{axis.name}" {name} is {_words(v.type[k])} and {_words(step[k])} in a step, but'
                f" {_words(expected[0])} and {_words(expected[1])} {'is what a stage needs' if k in over else 'would agree'}."
                " (docs: pipelines#types)"
            )


def _check_application(node: Node, axes: tuple[Axis, ...]) -> None:
    """Check an operator: its states along each axis are a choice, and axes that share a factor divide it together."""
    assert node.body is not None, node
    degree: dict[tuple[State, ...], int] = {}
    sizes: dict[tuple[State, ...], int] = {}
    for k, axis in enumerate(axes):
        operands, results = tuple(v.type[k] for v in node.operands), tuple(t[k] for t in node.types)
        try:
            solution = placed(node.body, operands, results)
        except Unmatched:
            raise ParallelTypeError(_refusal(node, axis, operands, results)) from None
        if solution is None or not solution.matches:  # all unused or all replicated: every device does the same
            continue
        choice = choice_of(node.body, solution)
        if (choice.operands, choice.results) != (operands, results):
            raise ParallelTypeError(_refusal(node, axis, operands, results))
        degree[operands + results] = degree.get(operands + results, 1) * axis.size
        sizes[operands + results] = choice.size
    for states, n in degree.items():
        if sizes[states] and sizes[states] % n:
            raise ParallelTypeError(
                f"{_where(node)}: {n} devices share a factor of size {sizes[states]}, which {n} does not divide."
                " (docs: types#divisibility)"
            )


def _refusal(node: Node, axis: Axis, operands: Sequence[State], results: Sequence[State]) -> str:
    """Return the message for states that an operator does not allow along an axis, with the nearest choice that it allows."""
    assert node.body is not None
    states = (*operands, *results)
    names = [f"operand {p}" for p in range(len(operands))] + [f"result {p}" for p in range(len(results))]
    values = zip(names, (*node.operands, *node.results), states, strict=True)
    shown = "\n".join(f"    {name} ({v.tensor}) is {_words(s)}" for name, v, s in values)
    nearest = max(choices(node.body), key=lambda c: sum(a == b for a, b in zip(c.states, states, strict=True)))
    changes = [f"{name} {_words(s)}" for name, s, now in zip(names, nearest.states, states, strict=True) if s != now]
    two_factors = sum(s.kind == "P" for s in operands) > 1
    cause = ": one axis cannot carry two factors of an operator" if two_factors else ""
    link = "types#one-axis-one-factor" if two_factors else "types#types"
    allowed = f"It would be allowed with {', '.join(changes)}."
    return f'{_where(node)}: along axis "{axis.name}"{cause}\n{shown}\n    {allowed} (docs: {link})'
