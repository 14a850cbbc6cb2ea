"""The sums inside of a body that are reduced for another one: smaller ones, and factors rather than their product."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.propagation import Matches
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED


def smallest_in_chain(body: Body, variable: int, matches_of: Matches) -> int:
    """Return the variable to reduce for another one: the smallest in the chain of sums of one operand that it is part of."""
    chain, first = [variable, *_sums_after(body, variable, matches_of)], variable
    while (producer := _producer(body, first)) is not None and (operand := _summand(body, producer, matches_of)) is not None:
        first = operand
        chain.append(first)
    return min(chain, key=lambda v: body.tensors[v].nbytes)


def regrouped(body: Body, reduced: Mapping[int, str], others: Collection[int], matches_of: Matches) -> dict[int, str]:
    """Return variables to reduce instead of some, by fewer collectives and by none that awaits another.

    Sums that are only added up are reduced together. Of two sums and their product, the sums are reduced, rather than one of them
    and the product: the two all-reduces can be one collective, and a sum that is not differentiated has none in the backward pass.

    Args:
        body: the body.
        reduced: the reductions by variable.
        others: variables that must not be reduced.
        matches_of: returns the matches of an equation.
    """
    chosen = dict(reduced)
    for v in reduced:
        factor = _other_factor(body, v, chosen, matches_of) if chosen[v] == "sum" else None
        if factor is not None and factor not in others:
            del chosen[v]
            chosen[factor] = "sum"
    sources = {_end_of_chain(body, v, matches_of): v for v, kind in chosen.items() if kind == "sum"}
    for e in body.equations if len(sources) > 1 else ():
        summands = _summands(body, e, sources, matches_of)
        result = e.results[0] if summands else None
        if result is None or result in others or result in chosen:
            continue
        if body.tensors[result].nbytes <= sum(body.tensors[sources[a]].nbytes for a in summands):
            for a in summands:
                del chosen[sources.pop(a)]
            chosen[result] = "sum"
            sources[_end_of_chain(body, result, matches_of)] = result
    return chosen


def _summands(body: Body, equation: Equation, sums: Collection[int], matches_of: Matches) -> list[int]:
    """Return the operands of an equation if it adds up several sums that nothing else reads, or an empty list."""
    operands = list(dict.fromkeys(a for a in equation.operands if isinstance(a, int)))
    if len(operands) < 2 or not all(a in sums and _sole_user(body, a) is equation for a in operands):
        return []
    positions = [p for p, a in enumerate(equation.operands) if isinstance(a, int)]
    matches = matches_of(body, equation, dict.fromkeys(positions, PARTIAL))
    return operands if any(PARTIAL in match.results for match in matches) else []


def _end_of_chain(body: Body, variable: int, matches_of: Matches) -> int:
    """Return the last variable of the chain of sums of one operand that begins with another."""
    return [variable, *_sums_after(body, variable, matches_of)][-1]


def _sums_after(body: Body, variable: int, matches_of: Matches) -> Iterator[int]:
    """Yield the variables of the chain of sums of one operand that follow another."""
    while (
        (user := _sole_user(body, variable)) is not None
        and _summand(body, user, matches_of) is not None
        and user.results[0] not in body.outputs
    ):
        variable = user.results[0]
        yield variable


def _other_factor(body: Body, product: int, reduced: Collection[int], matches_of: Matches) -> int | None:
    """Return the sum by which a reduced variable is multiplied in a product, if it is computed inside and not larger than that."""
    equation = _producer(body, product)
    if equation is None or len(equation.operands) != 2:
        return None
    for p, a in enumerate(equation.operands):
        if not isinstance(a, int) or a in reduced or a in body.inputs or equation.operands[1 - p] not in reduced:
            continue
        if body.tensors[a].nbytes <= body.tensors[product].nbytes:
            matches = matches_of(body, equation, {1 - p: REPLICATED, 2: PARTIAL})
            return a if any(match.operands[p] == PARTIAL for match in matches) else None
    return None


def _producer(body: Body, variable: int) -> Equation | None:
    equations = (body.equations[i] for i in body.touching.get(variable, ()))
    return next((e for e in equations if variable in e.results), None)


def _sole_user(body: Body, variable: int) -> Equation | None:
    users = [e for i in body.touching.get(variable, ()) if variable in (e := body.equations[i]).operands]
    return users[0] if len(users) == 1 and variable not in body.outputs and len(users[0].results) == 1 else None


def _summand(body: Body, equation: Equation, matches_of: Matches) -> int | None:
    """Return the only variable that an equation reads, if its result is the partial sum of that and either may be reduced."""
    operands = [a for a in equation.operands if isinstance(a, int)]
    if len(operands) != 1 or operands[0] in body.inputs:
        return None
    matches = matches_of(body, equation, {len(equation.operands): PARTIAL})
    return operands[0] if any(PARTIAL in match.operands for match in matches) else None
