"""A program with larger dimensions, whose values and gradients are those of the original.

    matmul(x, w)  =  slice(matmul(x, pad(w)))

The dimensions of some inputs are padded, and the padding follows each dimension through the program by the factors of the operator
table: an operator that has a factor whole, as its most major digit, runs with a larger one. Padding is masked where an operator
would mix it with the value (`fills`), and sliced off before an operator that cannot run on it, and before the results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unity.pcg.ir.gradient_flow import carrying
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, tensor_type
from unity.pcg.jaxprs.jaxprs import CUSTOM_JVP, REMATERIALIZED, SCANNED
from unity.pcg.operators.promised_reads import PROMISED
from unity.pcg.operators.table.elementwise import PLACED
from unity.pcg.operators.table.reduction import REDUCTIONS
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Factor, Slot, Spec, facts_of
from unity.pcg.types.neutral_elements import neutral_element
from unity.transforms.padding.fills import Fill, constant_of, enlarged, is_elementwise, result_fill
from unity.transforms.padding.look_ups import can_look_up, looked_up
from unity.transforms.padding.nested_programs import Argument, rematerialized, scanned, with_rule
from unity.transforms.padding.padded_values import PaddedValue, PaddedValues, Sizes


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
        values: their values in the padded program, and its equations.
        fills: the fills of results of elementwise operators, by operator and fills of operands.
    """

    def __init__(self, body: Body, active: Collection[int]) -> None:
        self.body, self.active = body, active
        self.values = PaddedValues(body)
        self.fills: dict[tuple, Fill] = {}

    def with_inputs(self, sizes: Mapping[int, Sizes], stored: Collection[int]) -> Body:
        """Return the program with some padded inputs and its own results."""
        values, inputs = self.values, list(self.body.inputs)
        for k, v in enumerate(self.body.inputs):
            if k in stored:
                inputs[k] = values.register(v, sizes[k], 0).variable
            else:
                values.present.add(v)
                if k in sizes:
                    values.padded[v] = values.enlarged_by_zeros(v, sizes[k], self.body.equations[0])
        for e in self.body.equations:
            self.equation(e)
        return values.program(inputs, [values.own(a, self.body.equations[-1]) for a in self.body.outputs])

    def with_padded_inputs(
        self, arguments: Sequence[Argument], call: Equation, carried: Sequence[Sizes]
    ) -> tuple[Body, tuple[PaddedValue | None, ...]]:
        """Return the program of a call on padded operands, and its padded results (`nested_programs.Walk`)."""
        values, inputs = self.values, list(self.body.inputs)
        for k, (v, argument) in enumerate(zip(self.body.inputs, arguments, strict=True)):
            if argument is None:
                values.present.add(v)
            else:
                inputs[k] = values.register(v, *argument).variable
        for e in self.body.equations:
            self.equation(e)
        last = self.body.equations[-1] if self.body.equations else call
        first = [values.zero_filled(a, sizes, last) for a, sizes in zip(self.body.outputs, carried, strict=False)]
        results = (*first, *map(values.of, self.body.outputs[len(first) :]))
        pairs = zip(self.body.outputs, results, strict=True)
        return values.program(inputs, [values.own(a, last) if r is None else r.variable for a, r in pairs]), results

    def equation(self, e: Equation) -> None:
        """Add the equations for one of the program."""
        padded = list(map(self.values.of, e.operands))
        known = {(p, d): size for p, value in enumerate(padded) if value is not None for d, size in value.sizes.items()}
        if known and e.name in REMATERIALIZED:
            rematerialized(self.values, e, _walk)
        elif known and e.name in SCANNED:
            scanned(self.values, e, _walk)
        elif not (known and e.name in CUSTOM_JVP and with_rule(self.values, e, _walk)):
            spec = spec_of(self.body, e)
            sizes = self.factors(e, spec, known) if known and spec is not None else {}
            if not sizes or spec is None or not self.enlarge(e, spec, sizes):
                self.keep(e)

    def keep(self, e: Equation) -> None:
        """Add an equation as it is."""
        self.values.writer.equations.append(e.reading(tuple(self.values.own(a, e) for a in e.operands)))
        self.values.present.update(e.results)

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
        facts = facts_of(e.name)
        if facts.product and facts.extends:
            groups = e.params.get("feature_group_count", 1), e.params.get("batch_group_count", 1)
            return groups == (1, 1) or (groups[1] == 1 and factor.operands[1] is None)
        if e.name in REDUCTIONS:  # padding may equal an infinite extremum, and share its cotangent
            through = isinstance(e.operands[0], int) and e.operands[0] in self.active and e.results[0] in self.active
            return not (factor.reduction in ("max", "min") and through)
        if facts.extends or _rearranges(e):
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
        operand_sizes = [_dimensions(t, [f.operands[p] for f in sizes], sizes) for p, t in enumerate(operands)]
        ends = [_dimensions(t, [f.results[r] for f in sizes], sizes) for r, t in enumerate(results)]
        if is_elementwise(e, spec, operands, results):
            return self.elementwise(e, operands, operand_sizes, ends[0])
        values = [self.values.wide(a, dims, e) if dims else None for a, dims in zip(e.operands, operand_sizes, strict=True)]
        for p, value in enumerate(values):
            reductions = {f.reduction for f in sizes if isinstance(f.operands[p], Slot) and not self.looked_up(e, f)} - {""}
            if value is not None and reductions:
                (reduction,) = reductions
                fill = neutral_element(reduction, operands[p].dtype)
                values[p] = self.values.refilled(e.operands[p], value, fill, e, always=e.name in REDUCTIONS)
        atoms = [self.values.own(a, e) if v is None else v.variable for a, v in zip(e.operands, values, strict=True)]
        params = _params(e, operands, operand_sizes, results, ends)
        looked = {d: operands[0].shape[d] for f in sizes for d in self.looked_up(e, f)}
        if looked:
            names = {0: e.results[0]} if not ends[0] else {}
            (result,) = self.values.writer.trace(lambda x, i: looked_up(e, looked, params, x, i), atoms, e, names)
            variables = (result,)
        else:
            shapes = (tensor_type(enlarged(t.shape, s), t.dtype) for t, s in zip(results, ends, strict=True))
            variables = tuple(v if not s else self.values.writer.new(t) for v, s, t in zip(e.results, ends, shapes, strict=True))
            self.bind(e, params, atoms, variables)
        fill = self.moved_fill(e, values, operand_sizes)
        for v, variable, dims, tensor in zip(e.results, variables, ends, results, strict=True):
            if not dims:
                self.values.present.add(v)
                continue
            value = PaddedValue(variable, dims, fill if tensor.floating or _rearranges(e) else None)
            self.values.padded[v] = value
            if tensor.floating and value.fill is None:
                self.values.padded[v] = self.values.refilled(v, value, 0, e, always=True)
        return True

    def moved_fill(self, e: Equation, values: Sequence[PaddedValue | None], operand_sizes: Sequence[Sizes]) -> Fill:
        """Return the fill of the results of an operator that only moves elements; None for others."""
        if not _rearranges(e):
            return None
        if e.name == PROMISED:
            return None if values[0] is None else values[0].fill
        fills = {None if v is None else v.fill for v in values}
        return fills.pop() if len(fills) == 1 else None

    def elementwise(self, e: Equation, operands: Sequence[Tensor], operand_sizes: Sequence[Sizes], end: Sizes) -> bool:
        """Add an elementwise operator on padded operands. Returns False, and adds nothing, if it has no finite fill."""
        result = self.body.tensors[e.results[0]]
        if not result.floating:  # whatever is in the padding of integers and booleans
            values = [self.values.wide(a, dims, e) if dims else None for a, dims in zip(e.operands, operand_sizes, strict=True)]
            atoms = [self.values.own(a, e) if w is None else w.variable for a, w in zip(e.operands, values, strict=True)]
            self.add(e, atoms, end, None)
            return True
        values: list[PaddedValue | None] = []
        fixed: list[Fill] = []  # of padded operands with a fill, and of literals with one element
        for a, dims in zip(e.operands, operand_sizes, strict=True):
            number = constant_of(a) if isinstance(a, Literal) else None
            whole = dims == dict(end) and number is None
            values.append(self.values.wide(a, dims, e) if dims and number is None else None)
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
                atoms.append(self.values.refilled(a, value, new, e).variable)
            else:  # the cotangent of a value that lacks a dimension is a sum over it, from which the padding is left out
                atoms.append(self.values.spread(a, value, end, new, result, e))
        self.add(e, atoms, end, fill)
        return True

    def add(self, e: Equation, operands: Sequence[Atom], sizes: Sizes, fill: Fill) -> None:
        """Add an operator with one padded result."""
        value = self.values.register(e.results[0], sizes, fill)
        self.bind(e, e.params, operands, [value.variable])

    def bind(self, e: Equation, params: Mapping[str, Any], operands: Sequence[Atom], results: Sequence[int]) -> None:
        """Add the primitive of an equation on other operands, and with other parameters."""
        self.values.writer.trace(lambda *xs: e.primitive.bind(*xs, **params), operands, e, dict(enumerate(results)))

    def result_fill(self, e: Equation, fills: Sequence[Fill], dtypes: Sequence[Any]) -> Fill:
        """Return the fill of an elementwise operator (`fills.result_fill`), computed once for equal ones."""
        active = tuple(k for k, a in enumerate(e.operands) if isinstance(a, int) and a in self.active)
        key = (e.signature, active, *map(repr, fills), *map(str, dtypes))
        if key not in self.fills:
            self.fills[key] = result_fill(e, fills, dtypes, active)
        return self.fills[key]


def _walk(
    body: Body, arguments: Sequence[Argument], call: Equation, carried: Sequence[Sizes] = ()
) -> tuple[Body, tuple[PaddedValue | None, ...]]:
    """Return a nested program on padded operands, and its padded results (`nested_programs.Walk`)."""
    inputs = tuple(body.tensors[v].floating for v in body.inputs)
    outputs = tuple(isinstance(a, int) and body.tensors[a].floating for a in body.outputs)
    return PaddedProgram(body, carrying(body, inputs, outputs)).with_padded_inputs(arguments, call, carried)


def _rearranges(e: Equation) -> bool:
    return facts_of(e.name).rearranges or e.name == PROMISED


def _dimensions(tensor: Tensor, places: Sequence[Any], sizes: Mapping[Factor, int]) -> dict[int, int]:
    """Return the padded sizes of a tensor's dimensions, where each factor has its place in it."""
    return {
        place.dim: size * (tensor.shape[place.dim] // factor.size)
        for place, (factor, size) in zip(places, sizes.items(), strict=True)
        if isinstance(place, Slot)
    }


def _params(
    e: Equation, operands: Sequence[Tensor], operand_sizes: Sequence[Sizes], results: Sequence[Tensor], ends: Sequence[Sizes]
) -> dict[str, Any]:
    """Return the parameters of an operator with padded operands and results: those that name shapes differ."""
    params, shape = dict(e.params), enlarged(results[0].shape, ends[0])
    first = enlarged(operands[0].shape, operand_sizes[0])
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
