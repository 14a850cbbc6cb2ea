"""The type checker of parallel graphs: every operator application is one that the operator table allows.

JAX catches a forgotten Reduce, but runs a relu over a partial sum without a word, and wrongly. This is the guard.

It guards against hangs, too. Devices along the axes of a pipeline, or of branches, do not run what is inside together: a stage
idles while another one works. A collective along such an axis would wait for devices that never come, so inside nothing
communicates along it, neither forward nor backward. A collective-permute is one collective of all devices of the program, whoever
sends to whom: XLA's runtime for CPUs waits for all of them. So inside no operator exchanges halos, along any axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity.base.errors import ParallelTypeError
from unity.pcg.ir.graph import BRANCHES, LOOPS, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, THROUGH, Node, Value, carried_by
from unity.pcg.parallel.branches import check_ends, names_of
from unity.pcg.parallel.resharding import absolute, kind_of, stationary
from unity.pcg.parallel.stages import ends_of, inside_state, one_more, outside_state, positions_of
from unity.pcg.propagation.choices import choice_of, choices
from unity.pcg.propagation.halos import halo_edges
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.solver import Unmatched
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, State, Type, misfit, show


def check(graph: PCG) -> None:
    """Raises ParallelTypeError, naming operator, operand, dimension and axis, unless all types of a parallel graph agree."""
    for k, v in enumerate(graph.outputs):
        for state, axis in zip(v.type, graph.axes, strict=True):
            if state.kind in "RS" or state.outer > 1:
                raise ParallelTypeError(
                    f'{_where(v.node)}: output {k} of the graph is {_words(state)} along axis "{axis.name}": it cannot leave the'
                    " program so.\n    Reduce or combine it first. (docs: types#changes)"
                )
    _graph(graph, {})


# Axes, by position, along which devices do not run a graph together, and the operator that the graph is nested in.
Apart = Mapping[int, Node]


def _graph(graph: PCG, apart: Apart) -> None:
    for node in graph.nodes:
        for v in node.results:
            _fits(node, v, graph.axes)
        if node.kind in PARALLELIZATION:
            _change(node, graph.axes)
            _unmoved(node, graph.axes, apart)
        elif node.inside is not None:
            _nested(node, graph.axes, apart)
        elif node.kind != "input":
            _application(node, graph.axes)
            _silent(node, graph.axes, apart)


def _where(node: Node) -> str:
    return f"{node.source or 'the graph'}: {node.kind}"


def _words(state: State) -> str:
    if state.kind != "P":
        return {"U": "unused", "R": "replicated for use", "S": "a partial sum"}[state.kind]
    return f"partitioned in dimension {state.dim}" + (f" at inner digit {state.outer}" if state.outer > 1 else "")


def _fits(node: Node, v: Value, axes: tuple[Axis, ...]) -> None:
    if len(v.type) != len(axes):
        raise ParallelTypeError(f"{_where(node)}: result {v.index} has a type of {len(v.type)} axes on a mesh of {len(axes)}")
    problem = misfit(v.tensor.shape, v.type, axes)
    if problem:
        raise ParallelTypeError(f"{_where(node)}: result {v.index}: {problem}. (docs: types#divisibility)")


def _change(node: Node, axes: tuple[Axis, ...]) -> None:
    (operand,) = node.operands
    before, after = absolute(operand.type, axes), absolute(node.types[0], axes)
    for axis, s, t in zip(axes, before, after, strict=True):
        if s != t and (node.kind == "view" or kind_of(s, t) != node.kind):
            raise ParallelTypeError(
                f'{_where(node)}: along axis "{axis.name}" it changes {_words(s)} to {_words(t)}, which is'
                f" {kind_of(s, t) or 'no operator at all'}. (docs: types#changes)"
            )


def _unmoved(node: Node, axes: tuple[Axis, ...], apart: Apart) -> None:
    """Raises ParallelTypeError if a parallelization operator changes types along an axis whose devices do not run it together."""
    before, after = (absolute(v.type, axes) for v in (*node.operands, *node.results))
    for k, around in apart.items():
        if not stationary(before[k], after[k]):
            raise _hang(node, f"changes {_words(before[k])} to {_words(after[k])}", axes[k], around)


def _silent(node: Node, axes: tuple[Axis, ...], apart: Apart) -> None:
    """Raises ParallelTypeError if an operator communicates inside along an axis whose devices do not run it together, or exchanges
    halos along any axis where not all devices run it."""
    assert node.body is not None
    for k, axis in enumerate(axes if apart else ()):
        solution = along_axis(node.body, tuple(v.type[k] for v in node.operands), tuple(t[k] for t in node.types))
        if solution is not None and halo_edges(node.body, solution):
            raise _hang(node, "exchanges halos, by collective-permutes of all devices,", axis, next(iter(apart.values())))
        if k in apart and solution is not None and solution.communicates:
            raise _hang(node, "reduces, or agrees on a number,", axis, apart[k])


def _hang(node: Node, what: str, axis: Axis, around: Node) -> ParallelTypeError:
    where = f" at {around.source}" if around.source else ""
    along = " ".join(names_of(around))
    return ParallelTypeError(
        f'{_where(node)}: along axis "{axis.name}" it {what} inside of the {around.kind}{where}. Its devices along {along} do not'
        f" run it together: those that do would wait for the others for ever.\n    Communicate outside of the {around.kind}, and"
        " keep all types along its axes inside; a plan file of an older version must be made again. (docs: types#control-flow)"
    )


def _apart(node: Node, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """The axes, by position, along which devices do not run what is inside of a node together."""
    if node.kind in (PIPELINE, TAIL):
        return positions_of(node, axes)
    if node.kind in (BRANCHES, STAGES):
        names = names_of(node)
        return tuple(k for k, axis in enumerate(axes) if axis.name in names)
    return ()


def _nested(node: Node, axes: tuple[Axis, ...], apart: Apart) -> None:
    assert node.inside is not None
    graph = node.inside
    for k in _apart(node, axes):
        if k in apart and node.kind in (PIPELINE, TAIL):
            raise _hang(node, "hands samples from stage to stage", axes[k], apart[k])
    if node.kind in (PIPELINE, TAIL):
        _stages(node, axes)
    if node.kind == BRANCHES:
        check_ends(node, axes)
    if node.kind in THROUGH:
        ends = [*zip(node.operands, map(Value, graph.inputs), strict=True), *zip(node.results, graph.outputs, strict=True)]
        for k, (v, w) in enumerate(ends):
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
    _graph(graph, {**dict.fromkeys(_apart(node, axes), node), **apart})


def _stages(node: Node, axes: tuple[Axis, ...]) -> None:
    """A pipeline's ends: as its stages need them along their axes, and along others as the steps have them.

    That every step works on each sample by itself follows from the operators inside, as of all graphs.
    """
    assert node.inside is not None
    over, ends = positions_of(node, axes), ends_of(node)
    for p, (v, n) in enumerate(zip(node.operands, node.inside.inputs, strict=True)):
        _end(node, f"operand {p}", v, n.types[0], p, over, axes)
    if node.kind == TAIL:
        _sums(node, over, axes)
        return
    for k, (t, n) in enumerate(zip(node.results, node.inside.outputs, strict=True)):
        _end(node, f"result {k}", t, n.type, ends.carried[k], over, axes)


def _sums(node: Node, over: tuple[int, ...], axes: tuple[Axis, ...]) -> None:
    """A tail's results: sums over the samples, which lie on different stages."""
    assert node.inside is not None
    for k, (found, end) in enumerate(zip(node.results, node.inside.outputs, strict=True)):
        for i, axis in enumerate(axes):
            if found.type[i] != end.type[i] or (i in over and end.type[i] != PARTIAL):
                raise ParallelTypeError(
                    f'{_where(node)}: along axis "{axis.name}" result {k} is {_words(found.type[i])} and {_words(end.type[i])} for'
                    " a micro-batch, but a tail adds up micro-batches, and along its stages all have a part of the sum."
                    " (docs: pipelines#types)"
                )


def _end(node: Node, name: str, v: Value, step: Type, position: int, over: tuple[int, ...], axes: tuple[Axis, ...]) -> None:
    stacked = position not in ends_of(node).constants
    for k, axis in enumerate(axes):
        within = one_more(step[k]) if stacked else step[k], step[k]
        if k in over:
            within = outside_state(node, position), inside_state(node, position)
        if (v.type[k], step[k]) != within:
            raise ParallelTypeError(
                f'{_where(node)}: along axis "{axis.name}" {name} is {_words(v.type[k])} and {_words(step[k])} in a step, but'
                f" {_words(within[0])} and {_words(within[1])} {'is what a stage needs' if k in over else 'would agree'}."
                " (docs: pipelines#types)"
            )


def _application(node: Node, axes: tuple[Axis, ...]) -> None:
    assert node.body is not None, node
    degree: dict[tuple[State, ...], int] = {}
    sizes: dict[tuple[State, ...], int] = {}
    for k, axis in enumerate(axes):
        operands, results = tuple(v.type[k] for v in node.operands), tuple(t[k] for t in node.types)
        try:
            solution = along_axis(node.body, operands, results)
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
    """What an operator is given along an axis, and the nearest thing that it allows."""
    assert node.body is not None
    given = (*operands, *results)
    names = [f"operand {p}" for p in range(len(operands))] + [f"result {p}" for p in range(len(results))]
    ends = zip(names, (*node.operands, *node.results), given, strict=True)
    shown = "\n".join(f"    {name} ({v.tensor}) is {_words(s)}" for name, v, s in ends)
    nearest = max(choices(node.body), key=lambda c: sum(a == b for a, b in zip(c.states, given, strict=True)))
    changes = [f"{name} {_words(s)}" for name, s, now in zip(names, nearest.states, given, strict=True) if s != now]
    two = [s for s in operands if s.kind == "P"]
    cause = ": one axis cannot carry two factors of an operator" if len(two) > 1 else ""
    link = "types#one-axis-one-factor" if len(two) > 1 else "types#types"
    allowed = f"It would be allowed with {', '.join(changes)}."
    return f'{_where(node)}: along axis "{axis.name}"{cause}\n{shown}\n    {allowed} (docs: {link})'
