"""Straight-line tails of pipelines: scans written out, and constants moved into the checkpoints that read them.

    scan(step, 0, (a, b))  =  step(step(0, a), b)

The last stage runs the tail, and nothing changes its type along the axes of the stages there. But a loop of the plan has one type
for a carry in all steps, and a sum over the samples is a partial sum, while its initial zero is not. Written out, it is a sum of
sums. A checkpoint makes its own constants: zeros from outside would have another type than the samples that they are added to.
"""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.capture.heavy_operators import constants
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.nested.programs import nested_body
from unity.transforms.loops.dependences import ScanParts
from unity.transforms.loops.unrolling import add_steps
from unity.transforms.splice import operator_at

LARGEST = 4096  # equations of all written-out steps of a loop: planning more operators takes minutes


def straight(body: Body) -> Body:
    """Return a program with its scans written out, and cheap constants moved into the checkpoints that read them.

    Scans and checkpoints in conditionals and derivative rules stay as they are.

    Raises Mixed, naming the loop, if its steps are too many equations.
    """
    return _with_own_constants(_without_loops(body))


def _without_loops(body: Body) -> Body:
    if not any(map(_has_loop, body.equations)):
        return body
    writer = EquationWriter.beside(body)
    for e in body.equations:
        if e.name in SCANNED:
            if (size := _equations(e)) > LARGEST:
                most = f"a pipeline by 1F1B can have {LARGEST} of a loop after its last layer"
                raise Mixed(f"{operator_at(e)} is a loop of {size} operators in all of its steps, and {most}")
            parts = ScanParts.of(e)
            add_steps(writer, replace(parts, step=_without_loops(parts.step)))
        else:
            writer.equations.append(_with_program(e, _without_loops(nested_body(e))) if _has_loop(e) else e)
    return writer.body(body.inputs, body.outputs)


def _has_loop(e: Equation) -> bool:
    """Return whether an equation is a scan, or a checkpoint of one."""
    return e.name in SCANNED or (e.name in REMATERIALIZED and any(map(_has_loop, nested_body(e).equations)))


def _equations(e: Equation) -> int:
    """Return the number of equations that stand for one if all loops are written out."""
    if e.name not in SCANNED + REMATERIALIZED:
        return 1
    return (e.params["length"] if e.name in SCANNED else 1) * sum(map(_equations, nested_body(e).equations))


def _with_own_constants(body: Body) -> Body:
    """Return a program whose checkpoints compute their constant operands themselves."""
    constant = constants(body)

    def changed(e: Equation) -> Equation:
        if e.name not in REMATERIALIZED:
            return e
        program = nested_body(e)
        writer, rest = EquationWriter.beside(program), list[int]()
        for p, a in enumerate(e.operands):
            if isinstance(a, Literal) or a in constant:
                writer.aliases[program.inputs[p]] = _copied(body, a, writer)
            else:
                rest.append(p)
        writer.equations += program.equations
        inside = _with_own_constants(writer.body([program.inputs[p] for p in rest], program.outputs))
        return replace(_with_program(e, inside), operands=tuple(e.operands[p] for p in rest))

    return replace(body, equations=tuple(map(changed, body.equations)))


def _copied(body: Body, atom: Atom, writer: EquationWriter) -> Atom:
    """Append the equations of a constant of another program, and return its variable; a literal as it is."""
    if isinstance(atom, Literal):
        return atom
    constant = constants(body)
    part, _ = extract(body, [constant[atom]], [atom], constant)
    names = {v: writer.new(t) for v, t in part.tensors.items()}
    for e in part.equations:
        own = e.reading(tuple(names[a] if isinstance(a, int) else a for a in e.operands))
        writer.equations.append(replace(own, results=tuple(names[v] for v in e.results)))
    return names[atom]


def _with_program(e: Equation, program: Body) -> Equation:
    """Return a checkpoint with another program."""
    return replace(e, params={**e.params, "jaxpr": program}, origin=None)
