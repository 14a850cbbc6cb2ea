"""A writer of equations, which traces JAX functions into the program that it builds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor
from unity.pcg.ir.tracing import trace


@dataclass(eq=False)
class EquationWriter:
    """The equations of a program that is being built, the types of its variables, and the numbers of new ones."""

    tensors: dict[int, Tensor]
    numbers: Iterator[int]
    equations: list[Equation] = field(default_factory=list)

    @classmethod
    def beside(cls, body: Body) -> EquationWriter:
        """Return a writer whose new variables have other numbers than those of a program."""
        return cls(dict(body.tensors), count(max(body.tensors, default=-1) + 1))

    def tensor(self, atom: Atom) -> Tensor:
        """Return the type of an atom."""
        return atom.tensor if isinstance(atom, Literal) else self.tensors[atom]

    def new(self, tensor: Tensor) -> int:
        """Return a new variable."""
        variable = next(self.numbers)
        self.tensors[variable] = tensor
        return variable

    def trace(
        self,
        function: Callable[..., Any],
        operands: Sequence[Atom],
        at: Equation,
        results: Mapping[int, int] | None = None,
        types: Iterable[Tensor] = (),
    ) -> list[int]:
        """Append the equations of a function and return the variables of its results.

        Args:
            function: A JAX function that returns arrays which depend on its arguments or on new constants.
            operands: Its arguments.
            at: The equation whose line, scope and group the new equations get.
            results: Variables for some results, by number. The others get new ones.
            types: Types that the function computes with beside those of its arguments and of these variables.
        """
        named = results or {}
        program = trace(function, (self.tensor(a).struct for a in operands), [*types, *(self.tensors[v] for v in named.values())])
        atoms: dict[int, Atom] = dict(zip(program.inputs, operands, strict=True))
        atoms |= {a: named[k] for k, a in enumerate(program.outputs) if k in named and isinstance(a, int)}
        for e in program.equations:
            atoms |= {v: self.new(program.tensors[v]) for v in e.results if v not in atoms}
            inputs = tuple(atoms[a] if isinstance(a, int) else a for a in e.operands)
            outputs = tuple(v for v in (atoms[v] for v in e.results) if isinstance(v, int))
            place = {"source": at.source, "scope": at.scope, "group": at.group}
            self.equations.append(replace(e, operands=inputs, results=outputs, **place))
        return [v for v in (atoms[a] for a in program.outputs if isinstance(a, int)) if isinstance(v, int)]
