"""Dead-code elimination, ancestors and descendants, and extraction of a part of a body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unity.pcg.ir.program import Body


def used(body: Body) -> Body:
    """Remove the equations that no output depends on."""
    live = ancestors(body, (a for a in body.outputs if isinstance(a, int)))
    equations = tuple(e for e in body.equations if not live.isdisjoint(e.results))
    return Body(body.inputs, body.outputs, equations, body.tensors)


def ancestors(body: Body, variables: Iterable[int]) -> set[int]:
    """Return the variables that some are computed from, and these themselves."""
    above = set(variables)
    for e in reversed(body.equations):
        if not above.isdisjoint(e.results):
            above.update(a for a in e.operands if isinstance(a, int))
    return above


def dependent_equations(body: Body, variables: Iterable[int]) -> list[int]:
    """Return the numbers of the equations that depend on some variables, in the order of the program."""
    below, numbers = set(variables), list[int]()
    for i, e in enumerate(body.equations):
        if any(a in below for a in e.operands if isinstance(a, int)):
            below.update(e.results)
            numbers.append(i)
    return numbers


def descendants(body: Body, variables: Iterable[int]) -> set[int]:
    """Return the variables that are computed from some, and these themselves."""
    sources = set(variables)
    return sources.union(*(body.equations[i].results for i in dependent_equations(body, sources)))


def extract(
    body: Body, chosen: Iterable[int], outputs: Sequence[int], duplicated: Mapping[int, int]
) -> tuple[Body, tuple[int, ...]]:
    """Extract the equations numbered `chosen` as a body. Returns it, and the variables of `body` that are its inputs.

    `duplicated` maps a variable to the equation that computes it, for equations that are copied rather than shared. A copy precedes
    its first use, so that equal operators have equal bodies wherever their constants were first computed.
    """
    numbers = _with_copies(body, chosen, duplicated)
    defined = {v for i in numbers for v in body.equations[i].results}
    inputs: dict[int, None] = {}
    for i in numbers:
        inputs.update((a, None) for a in body.equations[i].operands if isinstance(a, int) and a not in defined)
    order = tuple(inputs)
    equations = tuple(body.equations[i] for i in numbers)
    variables = {v for e in equations for v in e.results} | set(order)
    return Body(order, tuple(outputs), equations, {v: body.tensors[v] for v in variables}), order


def _with_copies(body: Body, chosen: Iterable[int], duplicated: Mapping[int, int]) -> list[int]:
    order: dict[int, None] = {}
    for i in sorted(chosen):
        stack = [i]
        while stack:
            operands = body.equations[stack[-1]].operands
            missing = (duplicated[a] for a in operands if isinstance(a, int) and a in duplicated)
            copy = next((j for j in missing if j not in order), None)
            if copy is None:
                order.setdefault(stack.pop(), None)
            else:
                stack.append(copy)
    return list(order)
