"""Values of a program's variables in its padded program: each as it is, or padded along some dimensions and filled.

An operator asks for the sizes and the fill that it needs. A value is then masked, sliced, padded or computed again in other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, tensor_type
from unity.transforms.padding.fills import Fill, constant_of, enlarged, filled

Sizes = Mapping[int, int]  # padded sizes of dimensions


@dataclass(frozen=True)
class PaddedValue:
    """A variable that is larger than the value of the program that it stands for.

    Attributes:
        variable: The variable.
        sizes: The size of each padded dimension, by its number.
        fill: The value of all elements outside of the program's value.
    """

    variable: int
    sizes: Sizes
    fill: Fill


class PaddedValues:
    """The values of a program's variables in its padded program, and the equations that compute them.

    Attributes:
        body: The program.
        writer: The equations so far. A variable of the program has the same number in them, if its own value is needed.
        padded: The padded values of variables.
        present: The variables whose own values are computed.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.writer = EquationWriter.beside(body)
        self.padded: dict[int, PaddedValue] = {}
        self.present: set[int] = set()
        self.producers = {v: e for e in body.equations for v in e.results}

    def program(self, inputs: Sequence[int], outputs: Sequence[Atom]) -> Body:
        """Return the program of the equations so far."""
        return used(Body(tuple(inputs), tuple(outputs), tuple(self.writer.equations), self.writer.tensors))

    def of(self, atom: Atom) -> PaddedValue | None:
        """Return the padded value of an atom, if it has one."""
        return self.padded.get(atom) if isinstance(atom, int) else None

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

    def wide(self, atom: Atom, sizes: Sizes, at: Equation) -> PaddedValue:
        """Return the value of an atom that is padded along exactly some dimensions."""
        value = self.of(atom)
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

    def refilled(self, atom: Atom, value: PaddedValue, fill: Fill, at: Equation, always: bool = False) -> PaddedValue:
        """Return a padded value with another fill; with `always`, a mask even if the fill is the same."""
        if value.fill is not None and value.fill == fill and not always:
            return value
        shape = self.body.tensor(atom).shape
        true = {d: shape[d] for d in value.sizes}
        (variable,) = self.writer.trace(lambda x: filled(x, true, fill), [value.variable], at)
        return replace(value, variable=variable, fill=fill)

    def zero_filled(self, atom: Atom, sizes: Sizes, at: Equation) -> PaddedValue | None:
        """Return an atom padded with zeros to some sizes; None if there are none."""
        return self.refilled(atom, self.wide(atom, sizes, at), 0, at) if sizes else None

    def spread(self, atom: Atom, value: PaddedValue | None, sizes: Sizes, fill: Fill, result: Tensor, at: Equation) -> int:
        """Return an operand that lacks padded dimensions of the result, broadcast to them and filled."""
        source = self.own(atom, at) if value is None else value.variable
        shape, true = enlarged(result.shape, sizes), {d: result.shape[d] for d in sizes}

        def broadcast(x: jax.Array) -> jax.Array:
            along = tuple(range(len(shape))) if x.ndim else ()
            return filled(lax.broadcast_in_dim(x, shape, along), true, fill)

        return self.writer.trace(broadcast, [source], at)[0]
