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
    """The equations of a program that is being built, the types of its variables, and the numbers of new ones.

    `aliases` are variables that no equation computes, as they are other atoms.
    """

    tensors: dict[int, Tensor]
    numbers: Iterator[int]
    equations: list[Equation] = field(default_factory=list)
    aliases: dict[int, Atom] = field(default_factory=dict)

    @classmethod
    def beside(cls, body: Body) -> EquationWriter:
        """Return a writer whose new variables have other numbers than those of a program."""
        return cls(dict(body.tensors), count(max(body.tensors, default=-1) + 1))

    def tensor(self, atom: Atom) -> Tensor:
        """Return the type of an atom."""
        return atom.tensor if isinstance(atom, Literal) else self.tensors[atom]

    def body(self, inputs: Sequence[int], outputs: Sequence[Atom]) -> Body:
        """Return the program, with the atoms in the place of their aliases."""
        if not self.aliases:
            return Body(tuple(inputs), tuple(outputs), tuple(self.equations), self.tensors)
        equations = (e.reading(tuple(map(self._atom, e.operands))) for e in self.equations)
        return Body(tuple(inputs), tuple(map(self._atom, outputs)), tuple(equations), self.tensors)

    def _atom(self, a: Atom) -> Atom:
        """Return the atom that an alias, or an alias of that, stands for."""
        while isinstance(a, int) and a in self.aliases:
            a = self.aliases[a]
        return a

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
            at: The equation whose line, scope, group and library function the new equations get.
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
            self.equations.append(replace(e, operands=inputs, results=outputs).with_provenance_of(at))
        return [v for v in (atoms[a] for a in program.outputs if isinstance(a, int)) if isinstance(v, int)]
