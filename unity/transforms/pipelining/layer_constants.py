"""Numbers of layers that are written out, as in `layer(x, w) * (1 + 0.1 * j)`: layers that differ in these alone are equal.

For the detection of layers, such numbers become inputs of the program. Afterwards those that are the same in all layers are
literals again, and the others are inputs of their layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED
from unity.search.joint.segments import Segment
from unity.transforms.pipelining.checkpoint_numbers import is_number, with_numbers_as_operands


@dataclass(frozen=True, eq=False)
class OpenProgram:
    """A program whose numbers are inputs, so that equations that differ in a number are equal.

    Attributes:
        body: the program. Its equations have the order and the results of the original ones.
        numbers: the variables in the places of literals.
    """

    body: Body
    numbers: Mapping[int, Literal]

    def closed(self, layers: Sequence[Segment]) -> list[Segment]:
        """Return equal layers with numbers that are the same in all of them as literals."""
        columns = zip(*(layer.inputs for layer in layers), strict=True)
        same = {p for p, column in enumerate(columns) if len({self._key(v) for v in column}) == 1 and column[0] in self.numbers}
        return [self._with_literals(layer, same) for layer in layers]

    def stacked(self, variables: Sequence[int]) -> np.ndarray:
        """Return the numbers of some variables as one array."""
        literals = [self.numbers[v] for v in variables]
        return np.stack([np.asarray(literal.value, literal.tensor.dtype) for literal in literals])

    def _key(self, variable: int) -> str:
        return self.numbers[variable].key if variable in self.numbers else ""

    def _with_literals(self, layer: Segment, positions: set[int]) -> Segment:
        body, inputs = layer.body, layer.inputs
        values = {body.inputs[p]: self.numbers[inputs[p]] for p in positions}
        remaining = [p for p in range(len(inputs)) if p not in positions]
        equations = tuple(_reading(e, values) for e in body.equations)
        closed = replace(body, inputs=tuple(body.inputs[p] for p in remaining), equations=equations)
        return replace(layer, body=closed, inputs=tuple(inputs[p] for p in remaining))


def opened(body: Body) -> OpenProgram:
    """Return a program with real numbers as inputs, except those of constants, and all numbers in which checkpoints differ."""
    body = with_numbers_as_operands(body)
    constant, tensors, numbers = constants(body), dict(body.tensors), dict[int, Literal]()
    equations = list[Equation]()
    for e in body.equations:
        variable = not (e.results and e.results[0] in constant)
        number = is_number if e.name in REMATERIALIZED else _is_real
        operands = tuple(_variable(a, tensors, numbers) if variable and number(a) else a for a in e.operands)
        equations.append(e if operands == e.operands else e.reading(operands))
    return OpenProgram(Body((*body.inputs, *numbers), body.outputs, tuple(equations), tensors), numbers)


def _is_real(a: Atom) -> bool:
    return is_number(a) and isinstance(a, Literal) and a.tensor.floating


def _variable(a: Atom, tensors: dict[int, Tensor], numbers: dict[int, Literal]) -> Atom:
    """Return a new variable for a number."""
    assert isinstance(a, Literal)
    number = max(tensors) + 1 if not numbers else next(reversed(numbers)) + 1
    tensors[number], numbers[number] = a.tensor, a
    return number


def _reading(e: Equation, values: Mapping[int, Literal]) -> Equation:
    operands = tuple(values.get(a, a) if isinstance(a, int) else a for a in e.operands)
    return e if operands == e.operands else e.reading(operands)
