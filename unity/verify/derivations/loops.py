"""Check that two programs are equal by rules of loops: their scans, in the same order, take equal steps.

Scans that carry the same and take equal steps compute the same, by induction on the steps (`verify.proofs.loop_rules`). A step
of the second program may read values that are computed before the loop. Their value in one step is derived from the equations that
compute them (`single_steps.py`), down to constants and slices that the scan of the first program reads. The canonical forms of both
steps must be equal then, and so must those of the programs' outputs. None of the code that applies rules is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from unity.base.errors import DerivationError
from unity.base.formatting import with_article
from unity.pcg.ir.program import Body, Equation, tensor_type
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.pcg.propagation.nested.scan_programs import inside
from unity.verify.derivations.canonical_form import apply_body
from unity.verify.derivations.evaluation import (
    Evaluation,
    Scan,
    Steps,
    Values,
    applied,
    compare,
    function_value,
    nested_input,
    require_types,
    tensor_of,
)
from unity.verify.derivations.nodes import CanonicalValue, NodeStore
from unity.verify.derivations.products_by_parts import by_parts

_OTHER_NUMBER = "the program after rules of loops has another number of scans and checkpoints"


Loops = frozenset[tuple[str, int, int]]  # each by the content hash of its step, its number of steps, and its `unroll`


def check_loops(before: Body, after: Body, *, written_out: Loops = frozenset()) -> None:
    """Check that a program after rules of loops computes the one before. Raises DerivationError where that is not derived.

    Args:
        before: the program before.
        after: the program after.
        written_out: the loops in whose place the program after has the steps.
    """
    require_types(before, after)
    try:
        _check_programs(before, after, written_out)
    except DerivationError:
        if written_out:  # whose steps would be other ones by parts
            raise
        _check_programs(by_parts(before), by_parts(after), written_out)


def _check_programs(before: Body, after: Body, written_out: Loops) -> None:
    """Check that two programs of the same inputs have equal outputs. Raises DerivationError."""
    store = NodeStore()
    inputs = [store.unarranged("input", (k,), (), before.tensors[v]) for k, v in enumerate(before.inputs)]
    _check_equal(store, (before, after), (inputs, inputs), written_out)


def _check_equal(store: NodeStore, programs: tuple[Body, Body], arguments: tuple[Values, Values], written_out: Loops) -> None:
    """Check that two programs have equal outputs on values. Raises DerivationError."""
    first, second = _walked(store, programs, arguments, written_out)
    compare(first, programs[0].outputs, second, programs[1].outputs)


def _walked(
    store: NodeStore, programs: tuple[Body, Body], arguments: tuple[Values, Values], written_out: Loops
) -> tuple[Evaluation, Evaluation]:
    """Evaluate two programs on values, and check that their scans and checkpoints, in order, compute the same."""
    first, second = (Evaluation(store, *program) for program in zip(programs, arguments, strict=True))
    for around, one in _nested(first, written_out):
        other = second.until_nested()
        if other is None:
            raise DerivationError(_OTHER_NUMBER)
        if one.name != other.name:
            raise DerivationError(
                f"where the program has {with_article(one.name)}, the program after rules of loops has {with_article(other.name)}"
            )
        if one.name in SCANNED:
            _check_scans(around, one, second, other, written_out)
        else:
            _check_checkpoints(around, one, second, other, written_out)
    if second.until_nested() is not None:
        raise DerivationError(_OTHER_NUMBER)
    return first, second


def _nested(program: Evaluation, written_out: Loops) -> Iterator[tuple[Evaluation, Equation]]:
    """Evaluate a program, and yield its scans and checkpoints in order, each with the evaluation that has to know its results.

    The steps of a loop that is written out are evaluated one after the other, and scans and checkpoints in them are yielded.
    """
    while (e := program.until_nested()) is not None:
        scan = Scan.of(program, e) if e.name in SCANNED and e.params["length"] else None
        if scan is None or (scan.step.key, e.params["length"], e.params["unroll"]) not in written_out:
            yield program, e
            continue
        carry, rows = scan.initial, dict[int, Values]()
        steps = range(e.params["length"])
        for k in reversed(steps) if e.params["reverse"] else steps:
            slices = [function_value(program.store, lambda x, k=k: x[k], [stack]) for stack in scan.stacks]
            step = Evaluation(program.store, scan.step, [*scan.constants, *carry, *slices], (*program.name, k))
            yield from _nested(step, written_out)
            outputs = [step.of(a) for a in scan.step.outputs]
            carry, rows[k] = outputs[: len(carry)], outputs[len(carry) :]
        emitted = zip(*(rows[k] for k in steps), strict=True)
        stacks = [function_value(program.store, lambda *x: jnp.stack(x), values) for values in emitted]
        program.know(e, [*carry, *stacks])


def _check_checkpoints(first: Evaluation, one: Equation, second: Evaluation, other: Equation, written_out: Loops) -> None:
    """Check that two checkpoints, one of each program, compute the same."""
    old, new, operands = inside(one), inside(other), [first.of(a) for a in one.operands]
    assert old is not None
    assert new is not None
    if operands != [second.of(a) for a in other.operands] or one.params.get("policy") is not other.params.get("policy"):
        raise DerivationError(f"the program after rules of loops has {with_article(one.name)} of other operands")
    arguments = [nested_input(first.store, "operand", x, x.shape) for x in operands]
    _check_equal(first.store, (old, new), (arguments, arguments), written_out)
    first.know(one, [first.opaque(one, k) for k in range(len(one.results))])
    second.know(other, [first.values[v] for v in one.results])


def _check_scans(first: Evaluation, one: Equation, second: Evaluation, other: Equation, written_out: Loops) -> None:
    """Check that two scans, one of each program, compute the same, and learn their results.

    The second may lack carries of the first that only add up values.
    """
    old, new = Scan.of(first, one), Scan.of(second, other)
    if any(one.params[name] != other.params[name] for name in ("length", "reverse")):
        raise DerivationError("a scan after rules of loops has another length or direction")
    store, others, others_after = first.store, old.others, new.others
    if len(others) != len(others_after):
        raise DerivationError("a scan after rules of loops carries something else")
    carried = [store.unarranged("input", ("carry", k), (), tensor_of(x, x.shape)) for k, x in enumerate(old.initial)]
    # No step reads a sum except to add to it, so their evaluation does not need to know which sums are equal.
    carried_after = [store.unarranged("input", ("sum", j), (), tensor_of(x, x.shape)) for j, x in enumerate(new.initial)]
    for k, j in zip(others, others_after, strict=True):
        carried_after[j] = carried[k]
    steps = Steps(store, second, set(old.constants), set(old.stacks), length=int(old.equation.params["length"]))
    arguments = [*map(steps.constant, old.constants), *carried, *map(steps.slice, old.stacks)]
    slices = [steps.at(a, 0) for a in new.atoms[1]]
    arguments_after = [*(steps.at(a, None) for a in new.atoms[0]), *carried_after, *slices]
    inner, inner_after = _walked(store, (old.step, new.step), (arguments, arguments_after), written_out)
    origins = _origins(old, inner, new, inner_after)
    # equal results of a step are equal in all steps at once, and so are a result and the stack of which it is a slice
    stacked = dict(zip(slices, new.stacks, strict=True)) | {steps.slice(x): x for x in old.stacks}
    results = {k: first.opaque(old.equation, k) for k in origins}
    carry = [results[k] for k in origins]
    for j, a in list(enumerate(new.step.outputs))[len(carry) :]:
        stacked.setdefault(inner_after.of(a), first.opaque(new.equation, j, ("emitted",), second.body))
        steps.known[new.equation.results[j], 0] = inner_after.of(a)
    for k in range(len(old.initial), len(old.step.outputs)):
        value = inner.of(old.step.outputs[k])
        if value not in stacked:
            stacked[value] = steps.missing[value] = first.opaque(old.equation, k)
        results[k] = stacked[value]
    for k in (k for k in old.sums if k not in results):
        results[k] = _sum_over_steps(old, k, inner, stacked, steps)
    first.know(old.equation, [results[k] for k in range(len(old.step.outputs))])
    second.know(new.equation, [*carry, *(stacked[inner_after.of(a)] for a in new.step.outputs[len(carry) :])])
    if steps.missing:
        second.awaited.append(steps)


def _origins(old: Scan, inner: Evaluation, new: Scan, inner_after: Evaluation) -> list[int]:
    """Return the carry of a scan, by number, that each carry of the scan after rules of loops is. Raises DerivationError.

    Sums are equal if they start from the same value and each step adds the same one.

    Args:
        old: the scan.
        inner: its step, evaluated.
        new: the scan after rules of loops.
        inner_after: the step of that.
    """
    sums: dict[tuple[CanonicalValue, CanonicalValue], list[int]] = {}
    for k, x in reversed(old.sums.items()):
        sums.setdefault((old.initial[k], inner.of(x.added)), []).append(k)
    others, origins = iter(old.others), list[int]()
    for j, initial in enumerate(new.initial):
        if j in new.sums:
            equal = sums.get((initial, inner_after.of(new.sums[j].added)))
            if not equal:
                raise DerivationError("a scan after rules of loops adds up something else")
            origins.append(equal.pop())
            continue
        k = next(others)
        if initial != old.initial[k] or inner.of(old.step.outputs[k]) != inner_after.of(new.step.outputs[j]):
            raise DerivationError("a scan after rules of loops carries something else")
        origins.append(k)
    return origins


def _sum_over_steps(
    old: Scan, k: int, inner: Evaluation, stacked: dict[CanonicalValue, CanonicalValue], steps: Steps
) -> CanonicalValue:
    """Return the last value of a carry that only adds up a value: the first one plus the sum over the steps.

    The sum of products whose operands the new loop returns is a product that contracts the steps, too.

    Args:
        old: the scan.
        k: the carry, by number.
        inner: its step, evaluated.
        stacked: the values of all steps at once, by those of one step. A value that the new loop lacks is added.
        steps: the values of one step; the value is missing until it is computed after the loop.
    """
    addition, added = old.sums[k].addition, old.sums[k].added
    product = next((e for e in old.step.equations if added in e.results and e.name == "dot_general"), None)
    operands = [stacked.get(inner.of(a)) for a in product.operands] if product is not None else []
    if product is None or None in operands:
        value, tensor = inner.of(added), old.step.tensors[added]
        whole = tensor_type((steps.length, *tensor.shape), tensor.dtype)
        if value not in stacked:
            name = (*old.around.name, k, "added")
            stacked[value] = steps.missing[value] = inner.store.unarranged("loop", name, (), whole)
        sums = apply_body(inner.store, trace(lambda x: jnp.sum(x, 0), [whole.struct]), [stacked[value]]).outputs
        return applied(inner.store, addition, inner.body, [old.initial[k], *sums])[0]
    ((cx, cy), (bx, by)) = product.params["dimension_numbers"]
    contracted = (0, *(int(d) + 1 for d in cx)), (0, *(int(d) + 1 for d in cy))
    numbers = contracted, (tuple(int(d) + 1 for d in bx), tuple(int(d) + 1 for d in by))
    contraction = replace(product, params={**product.params, "dimension_numbers": numbers}, origin=None)
    sums = applied(inner.store, contraction, inner.body, [x for x in operands if x is not None])
    return applied(inner.store, addition, inner.body, [old.initial[k], *sums])[0]
