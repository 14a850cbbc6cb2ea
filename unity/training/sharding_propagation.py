"""Propagation of shardings from the plans of a step to all its other values, through the factors of the operators between them.

An optimizer's moment is added to the gradient of its weight, element by element, so it is sharded like the weight. The row sums in
the state of a factored optimizer are sharded along the dimension that they have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.pcg.ir.program import Tensor, tensor_type
from unity.pcg.jaxprs.jaxprs import BRANCHED, SCANNED, called
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.jaxprs.shardings import MANUAL, PLACING
from unity.pcg.operators.table import TABLE
from unity.pcg.types.factors import Place, Slot

Entries: TypeAlias = tuple[Any, ...]  # of a partition specification, one for every dimension
Dims: TypeAlias = tuple[int | None, ...]  # for each dimension of a value, the linked dimension of another value, or None


def propagated_specs(jaxpr: core.Jaxpr, mesh: Mesh) -> dict[Any, PartitionSpec]:
    """Return the specifications of a program's variables, each propagated from the nearest value that a plan constrains.

    Args:
        jaxpr: the program.
        mesh: the mesh of the plans.
    """
    links = _Links(mesh)
    links.enter(jaxpr, [links.value(v.aval) for v in jaxpr.invars])
    specs = links.specifications()
    return {v: PartitionSpec(*specs[k]) for v, k in links.values.items() if k in specs}


class _Links:
    """A graph of the values of a program and its nested programs, with links between dimensions that an operator preserves.

    Attributes:
        values: by variable, the number of its value.
        ranks: the rank of each value.
        links: for each value, the linked values, each with the dimension of this value for every dimension of the other.
        planned: the values that plans constrain, in the program's order, with the constraints.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.values: dict[Any, int | None] = {}
        self.ranks: list[int] = []
        self.links: list[list[tuple[int, Dims]]] = []
        self.planned: list[tuple[int, Entries]] = []

    def value(self, aval: Any) -> int:
        """Return the number of a new value."""
        self.ranks.append(len(getattr(aval, "shape", ())))
        self.links.append([])
        return len(self.links) - 1

    def link(self, one: int, other: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Link two values by pairs of dimensions."""
        for source, target, dims in ((one, other, {j: i for i, j in pairs}), (other, one, dict(pairs))):
            self.links[source].append((target, tuple(dims.get(d) for d in range(self.ranks[target]))))

    def same(self, one: int | None, other: int | None, skip: int = 0) -> None:
        """Link all dimensions of two values. The first has `skip` more dimensions in front."""
        if one is not None and other is not None:
            self.link(one, other, [(d + skip, d) for d in range(self.ranks[other])])

    def enter(self, jaxpr: Any, inputs: Sequence[int | None]) -> list[int | None]:
        """Add a program whose arguments are these values. Returns its results."""
        self.define(jaxpr.invars, inputs)
        for eqn in jaxpr.eqns:
            self.define(eqn.outvars, self.results(eqn, list(map(self.read, eqn.invars))))
        return list(map(self.read, jaxpr.outvars))

    def define(self, variables: Sequence[Any], values: Sequence[int | None]) -> None:
        """Set the values of variables. A program that is entered again gets new ones."""
        self.values.update(zip(variables, values, strict=True))

    def read(self, atom: Any) -> int | None:
        """Return the value of an atom. Constants and literals have none."""
        return None if isinstance(atom, core.Literal) else self.values.get(atom)

    def results(self, eqn: core.JaxprEqn, operands: list[int | None]) -> list[int | None]:
        """Return the results of an equation, linked to its operands."""
        name, program = eqn.primitive.name, called(eqn.params)
        if program is not None and name not in (*SCANNED, MANUAL) and len(_open(program).invars) == len(operands):
            return self.enter(_open(program), operands)
        results: list[int | None] = [self.value(v.aval) for v in eqn.outvars]
        if name in SCANNED:
            self.scan(eqn, operands, results)
        elif name in BRANCHED:
            for branch in eqn.params["branches"]:
                for one, other in zip(self.enter(_open(branch), operands[1:]), results, strict=True):
                    self.same(one, other)
        elif name in PLACING:
            self.constrain(eqn.params[PLACING[name]], operands[0], results[0])
        elif name in TABLE:
            self.operator(eqn, operands, results)
        return results

    def scan(self, eqn: core.JaxprEqn, operands: list[int | None], results: list[int | None]) -> None:
        """Link the operands and results of a loop through its body."""
        consts, carried = constants_and_carry(eqn.params)
        body = _open(eqn.params["jaxpr"])
        inside = [*operands[:consts], *(self.value(v.aval) for v in body.invars[consts:])]
        ends = self.enter(body, inside)
        for k in range(carried):
            for other in (operands[consts + k], ends[k], results[k]):
                self.same(inside[consts + k], other)
        for outer, inner in zip(operands[consts + carried :], inside[consts + carried :], strict=True):
            self.same(outer, inner, skip=1)
        for outer, inner in zip(results[carried:], ends[carried:], strict=True):
            self.same(outer, inner, skip=1)

    def constrain(self, sharding: Any, operand: int | None, result: int | None) -> None:
        """Record a sharding constraint on the mesh of the plans. A plan constrains its arguments in this way."""
        self.same(operand, result)
        if operand is not None and isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            spec = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in sharding.spec]  # of a jax.vmap
            self.planned.append((operand, (*spec, *(None,) * (self.ranks[operand] - len(spec)))))

    def operator(self, eqn: core.JaxprEqn, operands: list[int | None], results: list[int | None]) -> None:
        """Link operands and results by the factors of an operator that have a whole dimension of both."""
        before, after = ([_tensor(v.aval) for v in values] for values in (eqn.invars, eqn.outvars))
        factors = TABLE[eqn.primitive.name].spec(eqn.params, before, after).factors
        for p, operand in enumerate(operands):
            for r, result in enumerate(results):
                dims = ((_dim(f.operands[p], before[p], f.size), _dim(f.results[r], after[r], f.size)) for f in factors)
                pairs = [(i, j) for i, j in dims if i is not None and j is not None]
                if operand is not None and result is not None and pairs:
                    self.link(operand, result, pairs)

    def specifications(self) -> dict[int, Entries]:
        """Return the specifications of all linked values, each from the nearest planned value, of equally near ones the first."""
        specs: dict[int, Entries] = {}
        queue = deque(self.planned)
        while queue:
            value, spec = queue.popleft()
            if value in specs:
                continue
            specs[value] = spec
            for other, dims in self.links[value]:
                entries = tuple(None if d is None else spec[d] for d in dims)
                if other not in specs and (any(entries) or not any(spec)):
                    queue.append((other, entries))
        return specs


def _dim(place: Place, tensor: Tensor, size: int) -> int | None:
    """Return the dimension at a place if the whole dimension is one factor of this size, or else None."""
    return place.dim if isinstance(place, Slot) and tensor.shape[place.dim] == size else None


def _open(program: Any) -> Any:
    return getattr(program, "jaxpr", program)


def _tensor(aval: Any) -> Tensor:
    return tensor_type(aval.shape, aval.dtype)
