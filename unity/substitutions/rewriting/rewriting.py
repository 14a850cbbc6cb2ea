"""Replacement of an occurrence of a rule in a captured program. The new program shares all other equations with the old one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import jax
import networkx as nx

from unity.pcg.capture.value_numbering import deduplicated
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Literal, Tensor
from unity.pcg.ir.tracing import trace
from unity.pcg.types.factors import TABLE, facts_of
from unity.substitutions.language.term import Variable
from unity.substitutions.rewriting.occurrences import Occurrence
from unity.substitutions.rewriting.writing import write


def rewritten(body: Body, occurrence: Occurrence) -> Body | None:
    """Return the program with an occurrence replaced by the rule's other side, or None if a value would depend on itself.

    Equations of the occurrence that other equations need remain.
    """
    sub, inputs = _written(body, occurrence)
    number = max(body.tensors, default=-1) + 1
    names: dict[int, Atom] = dict(zip(sub.inputs, inputs, strict=True))
    added: list[Equation] = []
    tensors = dict(body.tensors)
    like = _producer(body, occurrence.roots[0].atom)
    for e in sub.equations:
        results = tuple(range(number, number + len(e.results)))
        number += len(results)
        names.update(zip(e.results, results, strict=True))
        tensors.update((new, sub.tensors[v]) for new, v in zip(results, e.results, strict=True))
        operands = tuple(_named(a, names) for a in e.operands)
        added.append(replace(e, operands=operands, results=results, source=like.source, scope=like.scope))
    new = {r.atom: _named(a, names) for r, a in zip(occurrence.roots, sub.outputs, strict=True) if isinstance(r.atom, int)}
    changed = [renamed(e, new) for e in body.equations]
    order = _ordered([*changed, *added])
    if order is None:
        return None
    outputs = tuple(new.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return tidy(Body(body.inputs, outputs, tuple(order), tensors))


def tidy(body: Body) -> Body:
    """Return a program without dead equations and without duplicates."""
    return used(deduplicated(body))


def _written(body: Body, occurrence: Occurrence) -> tuple[Body, list[Atom]]:
    """Return the replacement of an occurrence as a program, and the atoms of the body that are its inputs."""
    atoms = [x.atom for x in occurrence.tensors.values()]
    return _program(_Replacement(tuple(body.tensor(a) for a in atoms), _replacement_key(occurrence), occurrence)), atoms


@dataclass(frozen=True)
class _Replacement:
    """The replacement of an occurrence. Two are equal if their programs are: those depend on nothing but types and `key`."""

    tensors: tuple[Tensor, ...]
    key: tuple
    occurrence: Occurrence = field(compare=False)


@TABLE.clears
@lru_cache(maxsize=4096)
def _program(replacement: _Replacement) -> Body:
    """Return a replacement as a program, cached because a rule has equal occurrences in many programs and in many places."""
    names, terms = list(replacement.occurrence.tensors), replacement.occurrence.sides[1]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return write(replacement.occurrence, terms, dict(zip(names, arrays, strict=True)))

    return trace(run, (t.struct for t in replacement.tensors))


def _replacement_key(occurrence: Occurrence) -> tuple:
    """Return all of an occurrence that `write` depends on, except for the tensors' types."""
    seams = tuple(occurrence.types[Variable(name)].seams for name in occurrence.tensors)
    examples = tuple((name, x.operator, x.manner, _like(x.equation)) for name, x in sorted(occurrence.examples.items()))
    views = tuple((name, x.view) for name, x in occurrence.tensors.items()), tuple(r.view for r in occurrence.roots)
    promised = tuple(r.atom in occurrence.promised for r in occurrence.roots)
    return (occurrence.pattern, tuple(sorted(occurrence.attributes.items())), views, seams, examples, promised)


def _like(e: Equation) -> tuple:
    """Return the parts of an example that the equations written like it depend on."""
    return (e.name, e.signature, e.identity, tuple(a.key if isinstance(a, Literal) else "" for a in e.operands))


def _producer(body: Body, atom: Atom) -> Equation:
    return next(e for e in body.equations if atom in e.results)


def _named(atom: Atom, names: Mapping[int, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else names[atom]


def renamed(e: Equation, new: Mapping[int, Atom]) -> Equation:
    """Return an equation with operands renamed."""
    if not any(isinstance(a, int) and a in new for a in e.operands):
        return e
    return e.reading(tuple(new.get(a, a) if isinstance(a, int) else a for a in e.operands))


def _ordered(equations: Iterable[Equation]) -> list[Equation] | None:
    """Return equations in a topological order, as close to the given order as possible, or None if they have a cycle."""
    equations = list(equations)
    producer = {v: i for i, e in enumerate(equations) for v in e.results}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(equations)))
    for i, e in enumerate(equations):
        graph.add_edges_from((producer[a], i) for a in e.operands if isinstance(a, int) and a in producer)
    try:
        return [equations[i] for i in nx.lexicographical_topological_sort(graph)]
    except nx.NetworkXUnfeasible:
        return None


def content_key(body: Body) -> str:
    """Return a hash of a program's outputs that does not depend on the order of equations or of operands that commute."""
    keys: dict[int, str] = {v: f"in {k} {body.tensors[v]}" for k, v in enumerate(body.inputs)}

    def of(a: Atom) -> str:
        return a.key if isinstance(a, Literal) else keys[a]

    for e in body.equations:
        operands = [of(a) for a in e.operands]
        text = "\n".join([e.signature, *map(str, e.identity), *(sorted(operands) if facts_of(e.name).commutative else operands)])
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        keys.update((v, f"{digest}.{k}") for k, v in enumerate(e.results))
    return hashlib.sha256("\n".join(of(a) for a in body.outputs).encode()).hexdigest()[:32]
