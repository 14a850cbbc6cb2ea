"""A program with larger dimensions, whose values and gradients are those of the original.

    matmul(x, w)  =  slice(matmul(x, pad(w)))

The dimensions of some inputs are padded, and the padding follows each dimension through the program by the factors of the operator
table: an operator that has a factor whole, as its most major digit, runs with a larger one. Padding is masked where an operator
would mix it with the value (`fills`), and sliced off before an operator that cannot run on it, and before the results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.gradient_flow import carrying
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, close, tensor_type
from unity.pcg.jaxprs.jaxprs import CUSTOM_JVP, REMATERIALIZED, SCANNED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.operators.table.elementwise import PLACED
from unity.pcg.operators.table.reduction import REDUCTIONS
from unity.pcg.propagation.derivative_rules import is_readable, jvp_body
from unity.pcg.propagation.nested_programs import nested_body
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Factor, Slot, Spec
from unity.pcg.types.neutral_elements import neutral_element
from unity.transforms.padding.equation_writer import EquationWriter
from unity.transforms.padding.fills import (
    Fill,
    PaddedValue,
    constant_of,
    enlarged,
    filled,
    is_elementwise,
    result_fill,
)
from unity.transforms.padding.look_ups import can_look_up, looked_up

MOVES = frozenset({
    "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "concatenate", "rev", "split", "stack", "promised"
})  # fmt: skip
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# They run on padding of other dimensions than those along which they work.
OTHERS = frozenset({
    "cumsum", "argmax", "argmin", "sort", "reduce_window_sum", "reduce_window_max", "reduce_window_min"
})  # fmt: skip
CARRIES = 4  # passes over a scan's step, after which padding has reached all that is carried, or stays outside
Sizes = Mapping[int, int]  # padded sizes of dimensions


def padded_body(body: Body, inputs: Mapping[int, Sizes], stored: Collection[int], differentiated: Collection[int]) -> Body:
    """Return a program whose inputs are padded.

    Args:
        body: The program.
        inputs: The padded sizes of the dimensions of inputs, by the number of the input.
        stored: The numbers of those whose arrays are stored with zeros behind them. The program pads the others.
        differentiated: The numbers of inputs that have a gradient.
    """
    own = tuple(k in differentiated and body.tensors[v].floating for k, v in enumerate(body.inputs))
    ends = tuple(isinstance(a, int) and body.tensors[a].floating for a in body.outputs)
    walk = PaddedProgram(body, carrying(body, own, ends))
    return walk.with_inputs(inputs, stored)


class PaddedProgram:
    """The padded program of a program, built equation by equation.

    Attributes:
        body: the program.
        active: its variables through which a gradient flows.
        writer: the equations so far. A variable of the program has the same number in them, if its own value is needed.
        padded: the padded values of variables.
        present: the variables whose own values are computed.
    """

    def __init__(self, body: Body, active: Collection[int]) -> None:
        self.body, self.active = body, active
        self.writer = EquationWriter.beside(body)
        self.padded: dict[int, PaddedValue] = {}
        self.present: set[int] = set()
        self.producers = {v: e for e in body.equations for v in e.results}
        self.fills: dict[tuple, Fill] = {}

    def with_inputs(self, sizes: Mapping[int, Sizes], stored: Collection[int]) -> Body:
        """Return the program with some padded inputs and its own results."""
        inputs = list(self.body.inputs)
        first = self.body.equations[0]
        for k, v in enumerate(self.body.inputs):
            if k in stored:
                inputs[k] = self.input(v, sizes[k], 0).variable
            else:
                self.present.add(v)
                if k in sizes:
                    self.padded[v] = self.enlarged_by_zeros(v, sizes[k], first)
        for e in self.body.equations:
            self.equation(e)
        outputs = tuple(self.own(a, self.body.equations[-1]) for a in self.body.outputs)
        return used(Body(tuple(inputs), outputs, tuple(self.writer.equations), self.writer.tensors))

    def with_padded_inputs(
        self, values: Sequence[tuple[Sizes, Fill] | None], call: Equation, carried: Sequence[Sizes] = ()
    ) -> tuple[Body, tuple[PaddedValue | None, ...]]:
        """Return the program of a call on padded operands, and its padded results; None for results that are not padded.

        Args:
            values: the padded sizes and the fill of each operand; None for operands that are not padded.
            call: the call.
            carried: the padded sizes of the first results, which are filled with zeros.
        """
        inputs = list(self.body.inputs)
        for k, (v, value) in enumerate(zip(self.body.inputs, values, strict=True)):
            if value is None:
                self.present.add(v)
            else:
                inputs[k] = self.input(v, *value).variable
        for e in self.body.equations:
            self.equation(e)
        last = self.body.equations[-1] if self.body.equations else call
        results = tuple(self.padded.get(a) if isinstance(a, int) else None for a in self.body.outputs)
        for k, sizes in enumerate(carried):
            results = (*results[:k], self.zero_filled(self.body.outputs[k], sizes, last), *results[k + 1 :])
        pairs = zip(self.body.outputs, results, strict=True)
        outputs = tuple(self.own(a, last) if r is None else r.variable for a, r in pairs)
        return used(Body(tuple(inputs), outputs, tuple(self.writer.equations), self.writer.tensors)), results

    def input(self, variable: int, sizes: Sizes, fill: Fill) -> PaddedValue:
        """Return an input that is padded in storage."""
        return self.register(variable, sizes, fill)

    def register(self, variable: int, sizes: Sizes, fill: Fill) -> PaddedValue:
        """Add a padded value of a variable, as a new variable."""
        tensor = self.body.tensors[variable]
        new = self.writer.new(tensor_type(enlarged(tensor.shape, sizes), tensor.dtype))
        self.padded[variable] = PaddedValue(new, dict(sizes), fill)
        return self.padded[variable]

    def own(self, atom: Atom, at: Equation) -> Atom:
        """Return an atom with its own value, sliced from the padded one if it is not computed yet."""
        if isinstance(atom, int) and atom not in self.present:
            shape = self.body.tensors[atom].shape
            whole = self.padded[atom].variable
            self.writer.trace(lambda x: lax.slice(x, (0,) * len(shape), shape), [whole], at, {0: atom})
            self.present.add(atom)
        return atom

    def equation(self, e: Equation) -> None:
        """Add the equations for one of the program."""
        known = {
            (p, d): size
            for p, a in enumerate(e.operands)
            if isinstance(a, int) and a in self.padded
            for d, size in self.padded[a].sizes.items()
        }
        if known and e.name in REMATERIALIZED:
            self.rematerialized(e)
        elif known and e.name in SCANNED:
            self.scanned(e)
        elif known and e.name in CUSTOM_JVP and (call := self.ruled_call(e)) is not None:
            self.writer.equations.append(call)
        else:
            spec = spec_of(self.body, e)
            sizes = self.factors(e, spec, known) if known and spec is not None else {}
            if not sizes or spec is None or not self.enlarge(e, spec, sizes):
                self.keep(e)

    def keep(self, e: Equation) -> None:
        """Add an equation as it is."""
        self.writer.equations.append(e.reading(tuple(self.own(a, e) for a in e.operands)))
        self.present.update(e.results)

    def factors(self, e: Equation, spec: Spec, known: Mapping[tuple[int, int], int]) -> dict[Factor, int]:
        """Return the padded sizes of the factors of an operator.

        Args:
            e: The operator.
            spec: Its specification.
            known: The padded size of each dimension of operands (by position and dimension).
        """
        tensors = [self.body.tensor(a) for a in e.operands]
        chosen: dict[Factor, int] = {}
        refused: set[Factor] = set()
        for (p, d), size in known.items():
            factor = next((f for f in spec.factors if f.operands[p] == Slot(d)), None)
            if factor is None:
                continue
            rest = tensors[p].shape[d] // factor.size
            fits = size % rest == 0 and chosen.get(factor, size // rest) == size // rest and self.runs_on_padding(e, spec, factor)
            chosen[factor] = size // rest
            if not fits:
                refused.add(factor)
        looked = {d: size for f, size in chosen.items() for d in self.looked_up(e, f)}
        if looked and not can_look_up(e, self.body.tensor(e.operands[1]), looked):
            refused.update(f for f in chosen if self.looked_up(e, f))
        return {f: size for f, size in chosen.items() if f not in refused}

    def runs_on_padding(self, e: Equation, spec: Spec, factor: Factor) -> bool:
        """Return whether an operator can run on a larger factor, its most major digit wherever it has the factor."""
        if factor.halo is not None or factor.optional:
            return False
        if any(p is not None and not (isinstance(p, Slot) and p.outer == 1) for p in (*factor.operands, *factor.results)):
            return False
        if e.name in PRODUCTS:
            groups = e.params.get("feature_group_count", 1), e.params.get("batch_group_count", 1)
            return groups == (1, 1) or (groups[1] == 1 and factor.operands[1] is None)
        if e.name in REDUCTIONS:
            through = isinstance(e.operands[0], int) and e.operands[0] in self.active and e.results[0] in self.active
            return not (
                factor.reduction in ("max", "min") and through
            )  # padding may equal an infinite extremum, and share its cotangent
        if e.name == "gather" or e.name in MOVES or e.name in OTHERS:
            return True
        operands, results = [self.body.tensor(a) for a in e.operands], [self.body.tensors[v] for v in e.results]
        return e.name not in PLACED and is_elementwise(e, spec, operands, results)

    def looked_up(self, e: Equation, factor: Factor) -> list[int]:
        """Return the dimension of a gather's table that a factor looks up, if it does."""
        place = factor.operands[0] if e.name == "gather" and factor.reduction else None
        return [place.dim] if isinstance(place, Slot) else []

    def enlarge(self, e: Equation, spec: Spec, sizes: Mapping[Factor, int]) -> bool:
        """Add an operator with larger factors. Returns False, and adds nothing, if it has no fill."""
        operands = [self.body.tensor(a) for a in e.operands]
        results = [self.body.tensors[v] for v in e.results]
        wanted = [_dimensions(t, [f.operands[p] for f in sizes], sizes) for p, t in enumerate(operands)]
        ends = [_dimensions(t, [f.results[r] for f in sizes], sizes) for r, t in enumerate(results)]
        if is_elementwise(e, spec, operands, results):
            return self.elementwise(e, operands, wanted, ends[0])
        values = [self.wide(a, dims, e) if dims else None for a, dims in zip(e.operands, wanted, strict=True)]
        for p, value in enumerate(values):
            reductions = {f.reduction for f in sizes if isinstance(f.operands[p], Slot) and not self.looked_up(e, f)} - {""}
            if value is not None and reductions:
                (reduction,) = reductions
                fill = neutral_element(reduction, operands[p].dtype)
                values[p] = self.refilled(e.operands[p], value, fill, e, always=e.name in REDUCTIONS)
        atoms = [self.own(a, e) if v is None else v.variable for a, v in zip(e.operands, values, strict=True)]
        params = _params(e, operands, wanted, results, ends)
        looked = {d: operands[0].shape[d] for f in sizes for d in self.looked_up(e, f)}
        if looked:
            names = {0: e.results[0]} if not ends[0] else {}
            (result,) = self.writer.trace(lambda x, i: looked_up(e, looked, params, x, i), atoms, e, names)
            variables = (result,)
        else:
            shapes = (tensor_type(enlarged(t.shape, s), t.dtype) for t, s in zip(results, ends, strict=True))
            variables = tuple(v if not s else self.writer.new(t) for v, s, t in zip(e.results, ends, shapes, strict=True))
            self.bind(e, params, atoms, variables)
        fill = self.moved_fill(e, values, wanted)
        for v, variable, dims, tensor in zip(e.results, variables, ends, results, strict=True):
            if not dims:
                self.present.add(v)
                continue
            value = PaddedValue(variable, dims, fill if tensor.floating or e.name in MOVES else None)
            self.padded[v] = value
            if tensor.floating and value.fill is None:
                self.padded[v] = self.refilled(v, value, 0, e, always=True)
        return True

    def moved_fill(self, e: Equation, values: Sequence[PaddedValue | None], wanted: Sequence[Sizes]) -> Fill:
        """Return the fill of the results of an operator that only moves elements; None for others."""
        if e.name not in MOVES:
            return None
        if e.name == "promised":
            return None if values[0] is None else values[0].fill
        fills = {None if v is None else v.fill for v in values}
        return fills.pop() if len(fills) == 1 else None

    def elementwise(self, e: Equation, operands: Sequence[Tensor], wanted: Sequence[Sizes], end: Sizes) -> bool:
        """Add an elementwise operator on padded operands. Returns False, and adds nothing, if it has no finite fill."""
        result = self.body.tensors[e.results[0]]
        if not result.floating:  # whatever is in the padding of integers and booleans
            values = [self.wide(a, dims, e) if dims else None for a, dims in zip(e.operands, wanted, strict=True)]
            atoms = [self.own(a, e) if w is None else w.variable for a, w in zip(e.operands, values, strict=True)]
            self.add(e, atoms, end, None)
            return True
        values: list[PaddedValue | None] = []
        fixed: list[Fill] = []  # of padded operands with a fill, and of literals with one element
        for a, dims in zip(e.operands, wanted, strict=True):
            number = constant_of(a) if isinstance(a, Literal) else None
            whole = dims == dict(end) and number is None
            values.append(self.wide(a, dims, e) if dims and number is None else None)
            fixed.append(values[-1].fill if whole and values[-1] is not None else number)
        dtypes = [t.dtype for t in operands]
        for free, every in ((0, False), (1, False), (1, True)):
            fills = [
                free if f is None or (every and t.floating and value is not None) else f
                for value, f, t in zip(values, fixed, operands, strict=True)
            ]
            fill = self.result_fill(e, fills, dtypes)
            if fill is not None:
                break
        else:
            return False
        atoms: list[Atom] = []
        for a, value, old, new in zip(e.operands, values, fixed, fills, strict=True):
            if value is None and old is not None:
                atoms.append(a)
            elif value is not None and old is not None:
                atoms.append(self.refilled(a, value, new, e).variable)
            else:  # the cotangent of a value that lacks a dimension is a sum over it, from which the padding is left out
                atoms.append(self.spread(a, value, end, new, result, e))
        self.add(e, atoms, end, fill)
        return True

    def add(self, e: Equation, operands: Sequence[Atom], sizes: Sizes, fill: Fill) -> None:
        """Add an operator with one padded result."""
        value = self.register(e.results[0], sizes, fill)
        self.bind(e, e.params, operands, [value.variable])

    def bind(self, e: Equation, params: Mapping[str, Any], operands: Sequence[Atom], results: Sequence[int]) -> None:
        """Add the primitive of an equation on other operands, and with other parameters."""
        self.writer.trace(lambda *xs: e.primitive.bind(*xs, **params), operands, e, dict(enumerate(results)))

    def result_fill(self, e: Equation, fills: Sequence[Fill], dtypes: Sequence[Any]) -> Fill:
        """Return the fill of an elementwise operator (`fills.result_fill`), computed once for equal ones."""
        active = tuple(k for k, a in enumerate(e.operands) if isinstance(a, int) and a in self.active)
        key = (e.signature, active, *map(repr, fills), *map(str, dtypes))
        if key not in self.fills:
            self.fills[key] = result_fill(e, fills, dtypes, active)
        return self.fills[key]

    def spread(self, atom: Atom, value: PaddedValue | None, sizes: Sizes, fill: Fill, result: Tensor, at: Equation) -> int:
        """Return an operand that lacks padded dimensions of the result, broadcast to them and filled."""
        source = self.own(atom, at) if value is None else value.variable
        shape, true = enlarged(result.shape, sizes), {d: result.shape[d] for d in sizes}

        def broadcast(x: jax.Array) -> jax.Array:
            along = tuple(range(len(shape))) if x.ndim else ()
            return filled(lax.broadcast_in_dim(x, shape, along), true, fill)

        return self.writer.trace(broadcast, [source], at)[0]

    def refilled(self, atom: Atom, value: PaddedValue, fill: Fill, at: Equation, always: bool = False) -> PaddedValue:
        """Return a padded value with another fill; with `always`, a mask even if the fill is the same."""
        if value.fill is not None and value.fill == fill and not always:
            return value
        shape = self.body.tensor(atom).shape
        true = {d: shape[d] for d in value.sizes}
        (variable,) = self.writer.trace(lambda x: filled(x, true, fill), [value.variable], at)
        return replace(value, variable=variable, fill=fill)

    def wide(self, atom: Atom, sizes: Sizes, at: Equation) -> PaddedValue:
        """Return the value of an atom that is padded along exactly some dimensions."""
        value = self.padded.get(atom) if isinstance(atom, int) else None
        if value is not None and dict(value.sizes) == dict(sizes):
            return value
        if value is not None and all(value.sizes.get(d) in (None, n) for d, n in sizes.items()):
            return self.resized(atom, value, sizes, at)
        again = self.regenerated(atom, sizes, at) if isinstance(atom, int) and value is None else None
        return again or self.enlarged_by_zeros(atom, sizes, at)

    def resized(self, atom: Atom, value: PaddedValue, sizes: Sizes, at: Equation) -> PaddedValue:
        """Return a padded value that is padded along other dimensions: sliced where it should not be, and padded with its fill."""
        tensor = self.body.tensor(atom)
        limits = tuple(value.sizes.get(d, n) if d in sizes else n for d, n in enumerate(tensor.shape))
        more = [(0, sizes[d] - n if d in sizes else 0, 0) for d, n in enumerate(limits)]

        def resize(x: jax.Array) -> jax.Array:
            part = lax.slice(x, (0,) * x.ndim, limits) if limits != x.shape else x
            return lax.pad(part, jnp.asarray(value.fill or 0, x.dtype), more) if any(n for _, n, _ in more) else part

        (variable,) = self.writer.trace(resize, [value.variable], at)
        return PaddedValue(variable, dict(sizes), value.fill)

    def regenerated(self, variable: int, sizes: Sizes, at: Equation) -> PaddedValue | None:
        """Return a larger numbering or a wider broadcast in place of a padded one, if the variable is one."""
        e, tensor = self.producers.get(variable), self.body.tensors[variable]
        shape = enlarged(tensor.shape, sizes)
        if e is not None and e.name == "iota" and not tensor.floating:
            dtype, dimension = e.params["dtype"], e.params["dimension"]
            (new,) = self.writer.trace(lambda: lax.broadcasted_iota(dtype, shape, dimension), [], at)
            return PaddedValue(new, dict(sizes), None)
        if e is None or e.name != "broadcast_in_dim":
            return None
        (source,), along = e.operands, e.params["broadcast_dimensions"]
        own = self.body.tensor(source).shape
        if any(d in sizes and own[k] > 1 for k, d in enumerate(along)):
            return None
        fill = constant_of(source) if isinstance(source, Literal) else None
        true = {d: tensor.shape[d] for d in sizes}

        def broadcast(x: jax.Array) -> jax.Array:
            y = lax.broadcast_in_dim(x, shape, along)
            return filled(y, true, 0) if fill is None and tensor.floating else y

        (new,) = self.writer.trace(broadcast, [self.own(source, at)], at)
        return PaddedValue(new, dict(sizes), 0 if fill is None and tensor.floating else fill)

    def enlarged_by_zeros(self, atom: Atom, sizes: Sizes, at: Equation) -> PaddedValue:
        """Return a value with zeros behind it."""
        shape = self.body.tensor(atom).shape
        more = [(0, sizes.get(d, n) - n, 0) for d, n in enumerate(shape)]
        (variable,) = self.writer.trace(lambda x: lax.pad(x, jnp.zeros((), x.dtype), more), [self.own(atom, at)], at)
        return PaddedValue(variable, dict(sizes), False if self.body.tensor(atom).dtype == bool else 0)

    def rematerialized(self, e: Equation) -> None:
        """Add a checkpoint whose program runs on padded operands."""
        values = [self.padded.get(a) if isinstance(a, int) else None for a in e.operands]
        program, results = _walk(nested_body(e), [None if v is None else (v.sizes, v.fill) for v in values], e)
        operands = tuple(self.own(a, e) if v is None else v.variable for a, v in zip(e.operands, values, strict=True))
        variables = []
        for v, result in zip(e.results, results, strict=True):
            if result is None:
                self.present.add(v)
            variables.append(v if result is None else self.register(v, result.sizes, result.fill).variable)
        params = {**e.params, "jaxpr": program}
        self.writer.equations.append(replace(e, operands=operands, results=tuple(variables), params=params, origin=None))

    def scanned(self, e: Equation) -> None:
        """Add a scan whose steps run on padded slices. It carries values padded as at first or as a step returns."""
        body, (consts, carry) = nested_body(e), constants_and_carry(e.params)
        own = [self.padded.get(a) if isinstance(a, int) else None for a in e.operands]
        fixed = [None if v is None else (v.sizes, v.fill) for v in own[:consts]]
        slices = [None if v is None else _slice(v) for v in own[consts + carry :]]
        sizes: list[Sizes] = [{} if v is None else v.sizes for v in own[consts : consts + carry]]
        for _ in range(CARRIES):
            _, results = _walk(body, [*fixed, *((s, 0) if s else None for s in sizes), *slices], e)
            found = [s or ({} if r is None else r.sizes) for s, r in zip(sizes, results, strict=False)]
            if found == sizes:
                break
            sizes = found
        program, results = _walk(body, [*fixed, *((s, 0) if s else None for s in sizes), *slices], e, sizes)
        atoms = [self.own(a, e) if v is None else v.variable for a, v in zip(e.operands[:consts], own[:consts], strict=True)]
        for a, s in zip(e.operands[consts : consts + carry], sizes, strict=True):
            value = self.zero_filled(a, s, e)
            atoms.append(self.own(a, e) if value is None else value.variable)
        for a, part in zip(e.operands[consts + carry :], slices, strict=True):
            whole = {d + 1: n for d, n in part[0].items()} if part is not None else {}
            atoms.append(self.wide(a, whole, e).variable if whole else self.own(a, e))
        variables = []
        for k, (v, result) in enumerate(zip(e.results, results, strict=True)):
            if result is None:
                self.present.add(v)
                variables.append(v)
            else:
                moved = {d + (k >= carry): n for d, n in result.sizes.items()}
                variables.append(self.register(v, moved, result.fill).variable)
        params = {**e.params, "jaxpr": program}
        self.writer.equations.append(replace(e, operands=tuple(atoms), results=tuple(variables), params=params, origin=None))

    def zero_filled(self, atom: Atom, sizes: Sizes, at: Equation) -> PaddedValue | None:
        """Return an atom padded with zeros to some sizes; None if there are none."""
        return self.refilled(atom, self.wide(atom, sizes, at), 0, at) if sizes else None

    def ruled_call(self, e: Equation) -> Equation | None:
        """Return a call with a derivative rule, such as relu, on padded operands; None if not all results are padded alike."""
        values = [self.padded.get(a) if isinstance(a, int) else None for a in e.operands]
        if any(v is None or v.fill is None for v in values) or not is_readable(e):
            return None
        rule, inner = jvp_body(e), nested_body(e)
        arguments = [(v.sizes, v.fill) for v in values if v is not None]
        tangents = [(sizes, 0) for (sizes, _), floats in zip(arguments, rule.floating, strict=True) if floats]
        primal, results = _walk(inner, arguments, e)
        derivative, both = _walk(rule.body, [*arguments, *tangents], e)
        sizes = {tuple(sorted(r.sizes.items())) if r is not None else () for r in (*results, *both)}
        count = len(results)
        fills = [None if r is None else r.fill for r in (*results, *both)]
        wanted = [*fills[:count], *fills[:count], *(0 for _ in both[count:])]  # a rule may compute the values in another way
        if len(sizes) != 1 or None in fills or fills != wanted:
            return None

        @jax.custom_jvp
        def call(*xs: Any) -> Any:
            return tuple(_run(primal, xs))

        @call.defjvp
        def _(xs: Any, ts: Any) -> Any:
            out = _run(derivative, (*xs, *(t for t, floats in zip(ts, rule.floating, strict=True) if floats)))
            return tuple(out[:count]), tuple(out[count:])

        operands = tuple(v.variable for v in values if v is not None)
        program = close(jax.make_jaxpr(call)(*(self.writer.tensors[v].struct for v in operands)))
        (traced,) = program.equations  # JAX makes arrays that the function closes over operands of the call
        atoms = {v: (a, still) for v, a, still in zip(program.inputs, operands, e.still, strict=True)}
        reads, still = zip(*(atoms[a] if isinstance(a, int) else (a, True) for a in traced.operands), strict=True)
        variables = tuple(
            self.register(v, r.sizes, r.fill).variable for v, r in zip(e.results, results, strict=True) if r is not None
        )
        return replace(traced, operands=reads, results=variables, source=e.source, scope=e.scope, group=e.group, still=still)


def _slice(value: PaddedValue) -> tuple[Sizes, Fill] | None:
    """Return the padded sizes and the fill of one step's slice of a stacked value."""
    sizes = {d - 1: n for d, n in value.sizes.items() if d > 0}
    return (sizes, value.fill) if sizes else None


def _walk(
    body: Body, arguments: Sequence[tuple[Sizes, Fill] | None], call: Equation, carried: Sequence[Sizes] = ()
) -> tuple[Body, tuple[PaddedValue | None, ...]]:
    """Return the program of a call on padded operands, and its padded results (`PaddedProgram.with_padded_inputs`)."""
    inputs = tuple(body.tensors[v].floating for v in body.inputs)
    outputs = tuple(isinstance(a, int) and body.tensors[a].floating for a in body.outputs)
    return PaddedProgram(body, carrying(body, inputs, outputs)).with_padded_inputs(arguments, call, carried)


def _run(body: Body, operands: Sequence[Any]) -> list:
    """Run a program."""
    return run_body(body, operands, [()] * len(body.inputs), [()] * len(body.outputs), ())


def _dimensions(tensor: Tensor, places: Sequence[Any], sizes: Mapping[Factor, int]) -> dict[int, int]:
    """Return the padded sizes of a tensor's dimensions, where each factor has its place in it."""
    return {
        place.dim: size * (tensor.shape[place.dim] // factor.size)
        for place, (factor, size) in zip(places, sizes.items(), strict=True)
        if isinstance(place, Slot)
    }


def _params(
    e: Equation, operands: Sequence[Tensor], wanted: Sequence[Sizes], results: Sequence[Tensor], ends: Sequence[Sizes]
) -> dict[str, Any]:
    """Return the parameters of an operator with padded operands and results: those that name shapes differ."""
    params, shape = dict(e.params), enlarged(results[0].shape, ends[0])
    first = enlarged(operands[0].shape, wanted[0])
    if e.name == "broadcast_in_dim":
        params["shape"] = shape
    elif e.name == "reshape":
        params["new_sizes"] = shape
    elif e.name == "slice":
        params["limit_indices"] = tuple(
            n if d in ends[0] else limit for d, (n, limit) in enumerate(zip(first, params["limit_indices"], strict=True))
        )
    elif e.name == "split":
        params["sizes"] = tuple(enlarged(t.shape, s)[params["axis"]] for t, s in zip(results, ends, strict=True))
    elif e.name == "gather":
        whole = zip(params["slice_sizes"], operands[0].shape, first, strict=True)
        params["slice_sizes"] = tuple(m if k == n else k for k, n, m in whole)
    return params
