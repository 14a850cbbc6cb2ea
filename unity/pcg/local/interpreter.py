"""The interpreter of an operator's body on one device's pieces, which lowering, tests and proofs share.

Equations are interpreted, not bound as they are, for three reasons: JAX's primitives need operands that vary over the same mesh
axes, parameters that name shapes must name local ones, and custom derivative rules must apply to pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.pcg.ir.program import Atom, Body, Equation, Literal, close
from unity.pcg.jaxprs.jaxprs import CUSTOM_JVP, CUSTOM_VJP, LINEAR_SOLVE, REMATERIALIZED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.jaxprs.trace_contexts import default_promotion, precision_of
from unity.pcg.local import replicated_calls
from unity.pcg.local import varying_loops as loops
from unity.pcg.local.backward_rules import asks, backward_of, is_zero, with_zeros
from unity.pcg.local.collectives import apply, contribute
from unity.pcg.local.forward_rules import rule_for, solutions_of
from unity.pcg.local.halo_exchange import exchanged
from unity.pcg.local.second_derivatives import with_checked_derivative, without_derivative
from unity.pcg.local.widening import applied, rounded, sent, widens
from unity.pcg.operators.layout import Layout, PlacedTensor
from unity.pcg.operators.table import TABLE
from unity.pcg.operators.table.reduction import GENERAL_REDUCTION
from unity.pcg.parallel.resharding import steps
from unity.pcg.propagation.nested.agreements import agreements
from unity.pcg.propagation.nested.derivative_rules import as_function, is_reverse_only, jvp_body, vjp_bodies
from unity.pcg.propagation.nested.linear_solves import is_symmetric, program_names, solve_program, split_operands
from unity.pcg.propagation.nested.programs import branches, nested_body
from unity.pcg.propagation.nested.row_loops import rows_of
from unity.pcg.propagation.placement import Placing, around_scatter, placing
from unity.pcg.propagation.propagation import Solution, has_no_gradient
from unity.pcg.propagation.solver import call_solutions
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.accumulation import backward_dtype, forward_dtype, is_wide_sum, narrow, without_widening
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import Halo
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, Type
from unity.pcg.types.varying_axes import aligned, vary

Types = Sequence[Type]


def run_body(body: Body, operands: Sequence[Any], types: Types, results: Types, axes: tuple[Axis, ...]) -> list:
    """Return the results of a body on local pieces.

    Args:
        body: the body.
        operands: the pieces.
        types, results: the parallel types of its operands and results.
        axes: the mesh.
    """
    return BodyInterpreter(body, placing(body, tuple(types), tuple(results), len(axes)), axes).run(operands)


class BodyInterpreter:
    """One run of a body on pieces: the environment, and the placement of every variable."""

    def __init__(self, body: Body, placing: Placing, axes: tuple[Axis, ...]) -> None:
        self.body, self.placing, self.axes = body, placing, axes
        self.env: dict[int, Any] = {}
        self.replicated: dict[tuple[int, tuple[str, ...]], Any] = {}  # variables that vary along some axes

    def operand(self, number: int, position: int) -> PlacedTensor:
        """Return an operand as its equation sees it: a reduced variable is whole, and a zero may be a partial sum.

        A literal is stored in its own element type, since it has no cotangent.
        """
        atom = self.body.equations[number].operands[position]

        def state(s: Solution | None) -> State:
            if s is None:
                return UNUSED
            if s.repeats(self.body.equations[number]):
                return UNUSED
            if isinstance(atom, int) and (number, position) not in s.contributed:
                return s.seen(atom)
            return s.matches[number].operands[position] if s.matches else REPLICATED

        placed = self.placed(atom, tuple(map(state, self.placing)))
        return placed if isinstance(atom, int) else replace(placed, axes=without_widening(self.axes))

    def result(self, variable: int) -> PlacedTensor:
        """Return a variable as its equation produces it."""
        states = (UNUSED if s is None or variable in s.unused else s.states.get(variable, REPLICATED) for s in self.placing)
        return self.placed(variable, tuple(states))

    def placed(self, atom: Atom, type_: Type) -> PlacedTensor:
        """Return the tensor of an atom with a parallel type."""
        tensor = self.body.tensor(atom)
        return PlacedTensor(tensor.shape, tensor.dtype, type_, self.axes)

    def read(self, atom: Atom) -> Any:
        """Return the value of an atom."""
        if isinstance(atom, int):
            return self.env[atom]
        if is_key(atom):
            return atom.value
        with precision_of([atom.tensor]):  # the function itself may enable 64-bit types
            return jnp.asarray(atom.value, atom.tensor.dtype)

    def seen(self, atom: Atom, user: int) -> Any:
        """Return the value of an atom for a user: one that is the same on every device may be replicated for use there.

        `user` is the number of an equation, or -1 - k for the body's result k (see `Solution.replicates`).
        """
        if not isinstance(atom, int):
            return self.read(atom)
        per_axis = zip(self.axes, self.placing, strict=True)
        names = tuple(a.name for a, s in per_axis if s is not None and s.replicates(self.body, atom, user))
        if names and (atom, names) not in self.replicated:
            type_ = tuple(REPLICATED if a.name in names else UNUSED for a in self.axes)
            piece = as_held(self.env[atom], self.placed(atom, type_))  # its cotangents are summed in that type
            self.replicated[atom, names] = vary(piece, names)
        return self.replicated[atom, names] if names else self.env[atom]

    def contributed(self, number: int, position: int, x: Any) -> Any:
        """Return an operand of an equation, with zeros on all but the first device along axes where it is contributed to a sum."""
        per_axis = zip(self.axes, self.placing, strict=True)
        names = tuple(a.name for a, s in per_axis if s is not None and (number, position) in s.contributed)
        return contribute(x, names) if names else x

    def contributed_result(self, k: int, x: Any) -> Any:
        """Return a result of a rule, with zeros on all but the first device along axes where it is contributed to a sum."""
        per_axis = zip(self.axes, self.placing, strict=True)
        names = tuple(a.name for a, s in per_axis if s is not None and k in s.contributed_results)
        return contribute(x, names) if names else x

    def run(self, operands: Sequence[Any]) -> list:
        """Return the results of the body."""
        for v, x in zip(self.body.inputs, operands, strict=True):
            self.env[v] = as_held(x, self.result(v))
        for number, equation in enumerate(self.body.equations):
            results = self.equation(number)
            for v, x in zip(equation.results, results, strict=True):
                self.env[v] = self.reduce(v, x)
        return [self.contributed_result(k, self.seen(a, -1 - k)) for k, a in enumerate(self.body.outputs)]

    def reduce(self, variable: int, x: Any) -> Any:
        """Reduce or scatter a partial result along the axes where the solver inserted that.

        If it is scattered along one axis, the sums along others are part of the same change of type; maxima come before it.
        """
        around = around_scatter(self.placing, variable)
        kinds: dict[str, list[str]] = {}
        for axis, solution in zip(self.axes, self.placing, strict=True):
            if solution is not None and variable in solution.reduced:
                kinds.setdefault(solution.reduced[variable], []).append(axis.name)
        if around is not None:
            kinds.pop("sum", None)
        dtype = self.result(variable).dtype
        summed = is_wide_sum(dtype, tuple(UNUSED if s is None else s.seen(variable) for s in self.placing), self.axes)
        for kind, names in kinds.items():
            if kind != "sum" and narrow(dtype):
                x = x.astype(dtype)
            x = REDUCERS[kind](vary(x, names), tuple(names))
            if x.dtype != dtype and not summed:
                x = rounded(x, dtype)
        if around is not None:
            x = vary(x, [axis.name for axis, s in zip(self.axes, around[0], strict=True) if s == PARTIAL])
            for step in steps(*around, self.axes):
                x = apply(step, x, self.axes, self.body.tensors[variable].dtype)
        return x

    def layout(self, number: int) -> Layout:
        """Return the layout of the operands and results of an equation."""
        equation = self.body.equations[number]
        operands = tuple(self.operand(number, position) for position in range(len(equation.operands)))
        return Layout(equation.primitive, equation.params, operands, tuple(map(self.result, equation.results)))

    def equation(self, number: int) -> list:
        """Return the results of an equation."""
        equation, layout = self.body.equations[number], self.layout(number)
        pieces = (
            as_held(self.seen(a, number), p) if isinstance(a, int) or not a.sliceable else p.piece(self.read(a))
            for a, p in zip(equation.operands, layout.operands, strict=True)
        )
        operands = aligned([self.contributed(number, position, x) for position, x in enumerate(pieces)])
        nested = NESTED.get(equation.name)
        entry = TABLE.get(equation.name)
        program = replicated_calls.program(equation) if _is_unused(layout) else None
        if program is not None:
            return replicated_calls.call(equation, program, operands, self.run_unused)
        if nested is not None and (equation.origin is None or not _is_unused(layout) or replicated_calls.has_calls(equation)):
            return nested(equation, operands, layout, self.axes)  # JAX has no program of a rewritten equation
        if nested is not None:
            return as_function(equation)(*operands)
        operands = self.extended(equation, operands, layout)
        own, exact = (entry.local, entry.exact) if entry is not None else (None, False)
        own = self.reduced if equation.name == GENERAL_REDUCTION else own

        def local(pieces: list) -> list:
            if own is None:
                return layout.bind(*pieces)
            with default_promotion():
                return own(pieces, layout)

        return applied(local, operands, layout, exact) if widens(layout) else local(operands)

    def run_unused(self, body: Body, operands: Sequence[Any]) -> list:
        """Return the results of a body that every device runs alike, without communication."""
        return BodyInterpreter(body, (None,) * len(self.axes), self.axes).run(operands)

    def reduced(self, operands: list, layout: Layout) -> list:
        """Reduce pieces by a function traced again, since JAX cannot differentiate one inside a mesh that was traced outside."""
        n, program = len(layout.results), close(layout.params["jaxpr"])

        def combine(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(self.run_unused(program, (*x, *y)))

        return list(lax.reduce(tuple(operands[:n]), tuple(operands[n:]), combine, layout.params["dimensions"]))

    def extended(self, equation: Equation, operands: list, layout: Layout) -> list:
        """Return the operands of an equation, extended by the halos that its windows reach."""
        spec, result = spec_of(self.body, equation), list(operands)
        for position, dim, halo in spec.halos if spec is not None else ():
            if layout.operands[position].along(dim):
                result[position] = self.exchange(result[position], layout.operands[position], dim, halo)
        return result

    def exchange(self, x: Any, placed: PlacedTensor, dim: int, halo: Halo) -> Any:
        """Return an operand extended by its halo along one dimension."""

        def with_halo(x: Any) -> Any:
            return exchanged(x, placed, dim, halo)

        if placed.storage_dtype == placed.dtype or halo.outside != "sum":
            return with_halo(x)
        there, back = (wire(placed.dtype, placed.type, placed.axes) for wire in (forward_dtype, backward_dtype))
        whole = not is_wide_sum(placed.dtype, placed.type, placed.axes)
        return sent(with_halo, x, there, back, placed.dtype, placed.storage_dtype, whole)


def is_key(atom: Literal) -> bool:
    """Return whether a literal is a PRNG key, which NumPy cannot represent."""
    return jnp.issubdtype(atom.tensor.dtype, jax.dtypes.extended)


def _is_unused(layout: Layout) -> bool:
    """Return whether all devices do the same, so that JAX can run a nested call unchanged."""
    return all(s == UNUSED for p in layout.operands + layout.results for s in p.type)


def _of_booleans(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that also takes booleans, which it sends as integers."""
    return lambda x, names: collective(x.astype(jnp.int8), names).astype(bool) if x.dtype == bool else collective(x, names)


REDUCERS: Mapping[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "sum": lax.psum,
    "max": lambda x, names: lax.pmax(lax.stop_gradient(x), names),
    "min": lambda x, names: lax.pmin(lax.stop_gradient(x), names),
    "or": _of_booleans(lax.pmax),
    "and": _of_booleans(lax.pmin),
}


def as_held(x: Any, placed: PlacedTensor) -> Any:
    """Return a piece in the element type in which a device holds it. The tangent of an integer is returned unchanged."""
    return x.astype(placed.storage_dtype) if narrow(placed.dtype) and x.dtype != placed.storage_dtype else x


def _types(placed: Sequence[PlacedTensor]) -> tuple[Type, ...]:
    return tuple(p.type for p in placed)


def varied(values: Sequence[Any], placed: Sequence[PlacedTensor]) -> list:
    """Return values in the element types in which devices hold them, varying along every axis that their types use."""
    return [vary(as_held(x, p), p.varying_axes) for x, p in zip(values, placed, strict=True)]


def _undifferentiated(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...]) -> list:
    """Run a call that is never differentiated."""
    out = run_body(nested_body(equation), operands, _types(layout.operands), _types(layout.results), axes)
    return varied(out, layout.results)


def _custom_jvp(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...], widened: bool = False) -> list:
    """Run a custom_jvp call on pieces, with its rule on pieces as the derivative.

    A call that must be widened runs its rule as an operator (`applied`), whose second derivative is that of the call's program. So
    the call itself is checked then, too, and outside of the operator: the equation that checks would round its operands there.
    """
    if equation.undifferentiated:
        return _undifferentiated(equation, operands, layout, axes)
    if is_reverse_only(equation):
        return _custom_vjp(equation, operands, layout, axes)
    body, rule = nested_body(equation), jvp_body(equation)
    types, results = _types(layout.operands), _types(layout.results)
    ruled = BodyInterpreter(rule.body, solutions_of(rule, types, results, len(axes)), axes)
    if widens(layout) or _has_wide_tangents(ruled, set(rule.body.inputs[len(types) :])):  # a widened operator has no transpose
        assert equation.origin is not None
        narrow_axes = without_widening(axes)
        placed = (tuple(replace(p, axes=narrow_axes) for p in part) for part in (layout.operands, layout.results))
        inner = Layout(layout.primitive, layout.params, *placed)
        return applied(
            lambda pieces: _custom_jvp(equation, pieces, inner, narrow_axes, widened=True),
            operands,
            layout,
            value=lambda pieces: varied(run_body(body, pieces, types, results, axes), layout.results),
            guard=partial(with_checked_derivative, calls=(equation.origin, *rule.calls), place=equation.source),
        )

    @jax.custom_jvp
    def call(*primals: Any) -> Any:
        return varied(run_body(body, primals, types, results, axes), layout.results)

    def derivative(primals: Any, tangents: Any) -> Any:
        rule, solutions = rule_for(equation, tangents, types, results, len(axes))
        zero = [isinstance(t, SymbolicZero) for t in tangents]
        flagged = zip(tangents, zero, layout.operands, rule.floating, strict=True)
        chosen = [vary(jnp.zeros(t.shape, t.dtype), p.varying_axes) if z else t for t, z, p, f in flagged if f]
        primals = primals if widened else with_checked_derivative(primals, rule.calls, equation.source)
        out = varied(BodyInterpreter(rule.body, solutions, axes).run((*primals, *chosen)), layout.results * 2)
        return out[: len(results)], out[len(results) :]

    call.defjvp(derivative, symbolic_zeros=equation.params["symbolic_zeros"])
    return call(*operands)


def _has_wide_tangents(rule: BodyInterpreter, tangents: set[int]) -> bool:
    """Return whether an equation that depends on the tangents is widened.

    It has narrow operands or results that are partial sums, or whose cotangents are.
    """
    active = tangents
    for number, equation in enumerate(rule.body.equations):
        if not active.isdisjoint(a for a in equation.operands if isinstance(a, int)):
            active = active.union(equation.results)
            if widens(rule.layout(number)):
                return True
    return False


def _custom_vjp(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...]) -> list:
    """Run a custom_vjp call on pieces, with its forward and backward rules on pieces."""
    if equation.undifferentiated:
        return _undifferentiated(equation, operands, layout, axes)
    body, rule = nested_body(equation), vjp_bodies(equation)
    types, results = _types(layout.operands), _types(layout.results)
    n = len(results)
    per_axis = [
        call_solutions(equation, tuple(t[k] for t in types), tuple(t[k] for t in results))
        if any(t[k] != UNUSED for t in types + results)
        else None
        for k in range(len(axes))
    ]
    value_placing, forward_placing, backward_placing = (
        tuple(None if s is None else s[part] for s in per_axis) for part in range(3)
    )
    names = [a.name for a, s in zip(axes, per_axis, strict=True) if s is not None]
    told = asks(equation) or not all(rule.nonzero)  # of cotangents that are zero
    extremes = _reduces_extremes(rule.forward, forward_placing) or _reduces_extremes(rule.backward, backward_placing)

    @jax.custom_vjp
    def call(*primals: Any) -> Any:
        return varied(BodyInterpreter(body, value_placing, axes).run(primals), layout.results)

    def run_forward(*primals: Any) -> Any:
        values = [x.value for x in primals] if told else primals
        values = with_checked_derivative(values, rule.calls, equation.source)
        values = without_derivative(values, equation.source) if extremes else values
        out = BodyInterpreter(rule.forward, forward_placing, axes).run(values)
        return varied(out[:n], layout.results), out[n:]

    def run_backward(residuals: Any, cotangents: Any) -> Any:
        own = backward_of(equation, rule, cotangents, backward_placing)
        body, solutions, calls = own or (rule.backward, backward_placing, rule.calls)
        if own is not None:
            cotangents = [c for c in cotangents if not is_zero(c)]
        elif told:
            cotangents = with_zeros(equation, rule, cotangents, layout.results)
        values = with_checked_derivative((*residuals, *cotangents), calls, equation.source)
        is_reduced = extremes or _reduces_extremes(body, solutions)
        values = without_derivative(values, equation.source) if is_reduced else values
        gradients = iter(BodyInterpreter(body, solutions, axes).run(values))
        flagged = zip(rule.floating, layout.operands, strict=True)
        return tuple(vary(as_held(next(gradients), p), names) if f else None for f, p in flagged)

    call.defvjp(run_forward, run_backward, symbolic_zeros=told)
    return call(*operands)


def _reduces_extremes(body: Body, solutions: Placing) -> bool:
    """Return whether devices reduce a maximum, say, in a derivative rule that a second derivative would differentiate."""
    kinds = (item for s in solutions if s is not None for item in s.reduced.items())
    return any(kind != "sum" and not has_no_gradient(body, v) for v, kind in kinds)


def _remat(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...]) -> list:
    """Run a checkpointed program on pieces, under the same policy."""
    body, types, results = nested_body(equation), _types(layout.operands), _types(layout.results)
    run = jax.checkpoint(
        lambda *x: run_body(body, x, types, results, axes),
        prevent_cse=equation.params["prevent_cse"],
        policy=equation.params["policy"],
    )
    return run(*operands)


def _cond(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...]) -> list:
    """Run a conditional whose branches run on pieces."""
    types, results = _types(layout.operands[1:]), _types(layout.results)
    programs = [lambda *x, b=b: varied(run_body(b, x, types, results, axes), layout.results) for b in branches(equation)]
    return list(loops.switch(operands[0], programs, *operands[1:]))


def _while(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...]) -> list:
    """Run a `while` loop on pieces.

    If its rows finish independently and a step does not communicate, each device stops when its own rows have finished.
    """
    params = equation.params
    test, step = close(params["cond_jaxpr"]), close(params["body_jaxpr"])
    a, b = params["cond_nconsts"], params["body_nconsts"]
    types, results = _types(layout.operands), _types(layout.results)
    test_types = tuple(tuple(UNUSED if s == UNUSED else REPLICATED for s in types[0]) for _ in test.outputs) if types else ()
    rows = rows_of(equation)
    solutions = placing(step, types[a:], results, len(axes))
    independent = rows is not None and not any(s is not None and any(a.kind for a in agreements(step, s)) for s in solutions)

    def run_test(carry: Any) -> Any:
        if rows is not None and independent:
            return rows.more(carry)  # devices with other rows may continue
        return run_body(test, (*operands[:a], *carry), (*types[:a], *types[a + b :]), test_types, axes)[0]

    def run_step(carry: Any) -> Any:
        return varied(run_body(step, (*operands[a : a + b], *carry), types[a:], results, axes), layout.results)

    return list(loops.while_loop(run_test, run_step, varied(operands[a + b :], layout.results)))


def _scan(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...]) -> list:
    """Run a scan whose steps run on pieces."""
    params = equation.params
    body, (c, k) = nested_body(equation), constants_and_carry(params)
    types, results = _types(layout.operands), _types(layout.results)
    step_types = (*types[: c + k], *(_slice_type(t) for t in types[c + k :]))
    step_results = (*results[:k], *(_slice_type(t) for t in results[k:]))

    def step(carry: Any, xs: Any) -> Any:
        out = run_body(body, (*operands[:c], *carry, *xs), step_types, step_results, axes)
        return varied(out[:k], layout.results[:k]), out[k:]

    carry = varied(operands[c : c + k], layout.results[:k])
    carry, ys = loops.scan(step, carry, operands[c + k :], params["length"], params["reverse"], params["unroll"])
    return [*carry, *ys]


def _linear_solve(equation: Equation, operands: list, layout: Layout, axes: tuple[Axis, ...]) -> list:
    """Run a linear solve whose programs run on pieces."""
    types, results = _types(layout.operands), _types(layout.results)
    closed, right = split_operands(equation, varied(operands, layout.operands))  # JAX compares the types of both sides
    closed_types, right_types = split_operands(equation, types)
    n = len(right)

    def local(name: str) -> Callable[..., Any]:
        body = solve_program(equation, name)
        result_types, count = (right_types, n) if name == "matvec" else (results, len(results))

        def run(*arguments: Any) -> Any:
            out = run_body(body, (*closed[name], *arguments[-1]), (*closed_types[name], *right_types), result_types, axes)
            out = varied(out, layout.results[:count])
            return (out[:n], out[n:]) if count > n else out

        return run

    backward = local("transpose_solve") if "transpose_solve" in program_names(equation) else None
    solution = lax.custom_linear_solve(
        local("matvec"), right, local("solve"), backward, symmetric=is_symmetric(equation), has_aux=len(results) > n
    )
    return list(solution) if len(results) == n else [*solution[0], *solution[1]]


def _slice_type(type_: Type) -> Type:
    """Return the type of one step's slice of a stacked tensor."""
    return tuple(State("P", s.dim - 1, s.outer) if s.kind == "P" else s for s in type_)


NESTED: Mapping[str, Callable[[Equation, list, Layout, tuple[Axis, ...]], list]] = {
    **dict.fromkeys(CUSTOM_JVP, _custom_jvp),
    **dict.fromkeys(CUSTOM_VJP, _custom_vjp),
    **dict.fromkeys(REMATERIALIZED, _remat),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    LINEAR_SOLVE: _linear_solve,
}
