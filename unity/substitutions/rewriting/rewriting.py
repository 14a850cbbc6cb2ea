"""Rewriting a captured program: what a rule says takes the place of what it found. The rest is shared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import jax
import networkx as nx

from unity.pcg.capture.heavy_operators import pure
from unity.pcg.ir.dead_code import deduplicated, used
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor, close
from unity.substitutions.language.term import Variable
from unity.substitutions.rewriting.occurrences import Occurrence
from unity.substitutions.rewriting.writing import write

COMMUTATIVE = frozenset({"add", "mul", "add_any", "max", "min"})


def rewritten(body: Body, occurrence: Occurrence) -> Body | None:
    """The program with the other side of the rule in the place of an occurrence. None where a result would need itself.

    What the old results are computed from stays if something else reads it.
    """
    sub, inputs = _written(body, occurrence)
    number = max(body.tensors, default=-1) + 1
    names: dict[int, Atom] = dict(zip(sub.inputs, inputs, strict=True))
    made: list[Equation] = []
    tensors = dict(body.tensors)
    like = _maker(body, occurrence.roots[0].atom)
    for e in sub.equations:
        results = tuple(range(number, number + len(e.results)))
        number += len(results)
        names.update(zip(e.results, results, strict=True))
        tensors.update((new, sub.tensors[v]) for new, v in zip(results, e.results, strict=True))
        operands = tuple(_named(a, names) for a in e.operands)
        made.append(replace(e, operands=operands, results=results, source=like.source, scope=like.scope))
    new = {r.atom: _named(a, names) for r, a in zip(occurrence.roots, sub.outputs, strict=True) if isinstance(r.atom, int)}
    changed = [renamed(e, new) for e in body.equations]
    order = _ordered([*changed, *made])
    if order is None:
        return None
    outputs = tuple(new.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return tidy(Body(body.inputs, outputs, tuple(order), tensors))


def tidy(body: Body) -> Body:
    """Without equations that nothing depends on, equal ones computed once."""
    return used(deduplicated(body, pure))


def _written(body: Body, occurrence: Occurrence) -> tuple[Body, list[Atom]]:
    """The program of the other side, and what of the body its inputs are."""
    atoms = [x.atom for x in occurrence.tensors.values()]
    return _program(_Other(tuple(body.tensor(a) for a in atoms), said(occurrence), occurrence)), atoms


@dataclass(frozen=True)
class _Other:
    """The other side of an occurrence: what its program depends on, and for whoever writes it the occurrence."""

    tensors: tuple[Tensor, ...]
    said: tuple
    occurrence: Occurrence = field(compare=False)


@lru_cache(maxsize=4096)
def _program(other: _Other) -> Body:
    """A rule is found in one place of many programs, and in many places alike: it is written once."""
    names, terms = list(other.occurrence.tensors), other.occurrence.sides[1]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return write(other.occurrence, terms, dict(zip(names, arrays, strict=True)))

    return close(jax.make_jaxpr(run)(*(t.struct for t in other.tensors)))


def said(occurrence: Occurrence) -> tuple:
    """All that `write` makes of an occurrence follows from, but for the tensors: equal where the other side is written alike."""
    seams = tuple(occurrence.types[Variable(name)].seams for name in occurrence.tensors)
    examples = tuple((name, x.operator, x.manner, _like(x.equation)) for name, x in sorted(occurrence.examples.items()))
    views = tuple((name, x.view) for name, x in occurrence.tensors.items()), tuple(r.view for r in occurrence.roots)
    promised = tuple(r.atom in occurrence.promised for r in occurrence.roots)
    return (occurrence.pattern, tuple(sorted(occurrence.attributes.items())), views, seams, examples, promised)


def _like(e: Equation) -> tuple:
    """What other equations are made like, from this one."""
    return (e.name, e.signature, e.identity, tuple(a.key if isinstance(a, Literal) else "" for a in e.operands))


def _maker(body: Body, atom: Atom) -> Equation:
    return next(e for e in body.equations if atom in e.results)


def _named(atom: Atom, names: Mapping[int, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else names[atom]


def renamed(e: Equation, new: Mapping[int, Atom]) -> Equation:
    """The equation, where it reads an old variable, reading the new one."""
    if not any(isinstance(a, int) and a in new for a in e.operands):
        return e
    return e.reading(tuple(new.get(a, a) if isinstance(a, int) else a for a in e.operands))


def _ordered(equations: Iterable[Equation]) -> list[Equation] | None:
    """Operands before their users, otherwise as they were. None if that cannot be."""
    equations = list(equations)
    maker = {v: i for i, e in enumerate(equations) for v in e.results}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(equations)))
    for i, e in enumerate(equations):
        graph.add_edges_from((maker[a], i) for a in e.operands if isinstance(a, int) and a in maker)
    try:
        return [equations[i] for i in nx.lexicographical_topological_sort(graph)]
    except nx.NetworkXUnfeasible:
        return None


def content_key(body: Body) -> str:
    """A hash of what is computed: equal whatever the order of equations, of independent ones or of operands that commute."""
    found: dict[int, str] = {v: f"in {k} {body.tensors[v]}" for k, v in enumerate(body.inputs)}

    def of(a: Atom) -> str:
        return a.key if isinstance(a, Literal) else found[a]

    for e in body.equations:
        operands = [of(a) for a in e.operands]
        text = "\n".join([e.signature, *map(str, e.identity), *(sorted(operands) if e.name in COMMUTATIVE else operands)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        found.update((v, f"{digest}.{k}") for k, v in enumerate(e.results))
    return hashlib.sha256("\n".join(of(a) for a in body.outputs).encode()).hexdigest()[:32]
