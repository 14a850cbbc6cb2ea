"""The statements of one function, written from a local program: short expressions are inlined, the others get a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unity.base.errors import ExportError
from unity.export.primitives.collectives import COLLECTIVES, axis_names
from unity.export.primitives.primitive_call import AppliedPrimitive, Operand
from unity.export.primitives.public_names import NoPublicName, printer_of
from unity.export.primitives.table import AUTOMATIC, REDUCTION_METHODS, RESULT_NAMES, SCALAR_OPERAND
from unity.export.simplification import simplified, through_casts
from unity.export.source_code import Code, Scope, assign, call, definition, first_of, lines, packed, returned, unpacked
from unity.export.tracing import LocalProgram, varying_of
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.jaxprs.jaxprs import BRANCHED, LOOPED
from unity.pcg.operators.table.elementwise import ERROR_SLOPES

if TYPE_CHECKING:
    from unity.export.module import ModuleWriter

SHORT = 44  # characters of an expression that is written where it is used
LONGER = 72  # characters of an expression that its only user merges into its own form, or that is returned


class Block:
    """The statements of one function under construction."""

    def __init__(self, module: ModuleWriter, scope: Scope, indent: int = 4) -> None:
        self.module, self.scope, self.indent = module, scope, indent
        self.lines: list[str] = []

    def write(self, body: Body, operands: Sequence[Operand], keep: bool = False) -> list[Operand]:
        """Write the statements of a program, and return its results.

        Args:
            body: the program.
            operands: its operands.
            keep: whether the results are returned as they are, so that their expressions may be longer.
        """
        return BodyWriter(self, simplified(body), operands, keep).write()

    def let(self, preferred: Sequence[str], value: Code) -> list[Code]:
        """Assign a value to new names like the preferred ones, and return the names. A name `_` stays as it is."""
        names = ["_" if name == "_" else self.scope.new(name) for name in preferred]
        self.lines += assign(names, value, self.indent)
        return [Code(name) for name in names]

    def named(self, operand: Operand, preferred: str) -> Operand:
        """Return an operand as a name or a constant, so that a loop that reads it does not compute it in every step."""
        if operand.code.text.isidentifier() or (operand.constant is not None and operand.bare is None):
            return operand
        return replace(operand, code=self.let([preferred], operand.code)[0], producer=None, bare=None, constant=None)


class BodyWriter:
    """A writer of one program into a block."""

    def __init__(self, block: Block, body: Body, operands: Sequence[Operand], keep: bool) -> None:
        self.block, self.body, self.keep = block, body, keep
        self.env: dict[int, Operand] = dict(zip(body.inputs, operands, strict=True))
        self.uses = Counter(a for e in body.equations for a in e.operands if isinstance(a, int))
        self.uses.update(a for a in body.outputs if isinstance(a, int))
        self.users = {a: e for e in body.equations for a in e.operands if isinstance(a, int)}
        self.producers = {v: e for e in body.equations for v in e.results}
        self.place = {id(e): k for k, e in enumerate(body.equations)}
        self.reads: dict[int, set[int]] = {}  # the named values that the expression of a value reads

    def write(self) -> list[Operand]:
        for e in self.body.equations:
            nested = self.block.module.nested_writer(e)
            if nested is not None:
                results = nested(self, e)
                tensors = [self.body.tensors[v] for v in e.results]
                operands = map(Operand, results, tensors, varying_of_results(e))
                self.env.update(zip(e.results, operands, strict=True))
            else:
                self.write_equation(e)
        return [self.read(a) for a in self.body.outputs]

    def read(self, atom: Atom) -> Operand:
        if isinstance(atom, int):
            return self.env[atom]
        return Operand(self.block.module.constant(atom), atom.tensor, constant=atom)

    def write_equation(self, e: Equation) -> None:
        operands = [self.read(a) for a in e.operands]
        tensors, varying = [self.body.tensors[v] for v in e.results], varying_of_results(e)
        arguments = with_jax_constant(without_implied_casts(e.name, operands, varying[0]))
        application = AppliedPrimitive(e, tuple(arguments), tuple(tensors))
        module, codes = self.block.module, [o.code for o in arguments]
        own = module.in_rule and e.name in ERROR_SLOPES
        code = call(module.error_function(e.name), *codes) if own else printed(application)
        if e.primitive.multiple_results and len(tensors) > 1:
            names = [RESULT_NAMES.get(e.name, e.name) if self.uses[v] else "_" for v in e.results]
            codes = self.block.let(names, code)
            self.env.update(zip(e.results, map(Operand, codes, tensors, varying), strict=True))
            return
        if e.primitive.multiple_results:
            code = first_of(code)
        (v,) = e.results
        result = Operand(code, tensors[0], varying[0], producer=application)
        if e.name == "pvary" and (is_number(operands[0]) or operands[0].bare or not tensors[0].floating):
            bare = operands[0].bare or operands[0]
            result = replace(result, constant=operands[0].constant, producer=operands[0].producer, bare=bare)
        elif is_number(result):
            result = with_bare_number(result)
        elif not self.is_inlined(v, e, code):
            result = replace(result, code=self.block.let([RESULT_NAMES.get(e.name, e.name)], code)[0], producer=None)
        self.env[v] = result

    def is_inlined(self, v: int, e: Equation, code: Code) -> bool:
        """Return whether an expression is written where it is used, and record which named values it reads there."""
        user = self.users.get(v)
        self.reads[v] = {b for a in e.operands if isinstance(a, int) for b in self.reads.get(a, {a})}
        if not self.may_be_inlined(v, e, user, code):
            self.reads[v] = {v}
            return False
        return True

    def may_be_inlined(self, v: int, e: Equation, user: Equation | None, code: Code) -> bool:
        is_collective = e.name in COLLECTIVES and not (user is None and self.keep)
        if self.uses[v] != 1 or self.would_reorder_reads(v, e, user) or is_collective:
            return False
        if user is not None and user.name == "cond" and user.operands[0] == v and self.predicate(v) is not None:
            return True  # `lax.cond` takes the predicate itself
        if user is None:
            return len(code.text) <= (LONGER if self.keep else SHORT) or (self.keep and bool(code.items))
        reduces_with_user = e.name in REDUCTION_METHODS and user.name == "broadcast_in_dim"
        broadcasts_for_user = e.name == "broadcast_in_dim" and user.name in SCALAR_OPERAND
        limit = LONGER if reduces_with_user or broadcasts_for_user else SHORT
        return user.name not in LOOPED.union(BRANCHED) and len(code.text) <= limit

    def predicate(self, branch_index: Atom) -> Atom | None:
        """Return the boolean that a branch index is converted from, if it is."""
        producer = self.producer_of(branch_index)
        if producer is None or producer.name != "convert_element_type" or self.body.tensor(producer.operands[0]).dtype != bool:
            return None
        return producer.operands[0]

    def platforms(self, branch_index: Atom) -> tuple[tuple[str, ...] | None, ...] | None:
        """Return the platforms of each branch if the branch index is a platform's number. None among them is any other platform."""
        producer = self.producer_of(branch_index)
        return None if producer is None or producer.name != "platform_index" else producer.params["platforms"]

    def producer_of(self, atom: Atom) -> Equation | None:
        """Return the equation that computes a value, casts left out."""
        return self.producers.get(a) if isinstance(a := through_casts(atom, self.producers), int) else None

    def would_reorder_reads(self, v: int, e: Equation, user: Equation | None) -> bool:
        """Return whether inlining `v` would move its reads of a value behind other reads of that value.

        Gradients are added in the order of reads. The order of two summands does not matter.
        """
        shared = {a for a in self.reads[v] if self.uses[a] + (a in self.body.inputs) > 2 and self.body.tensors[a].floating}
        end = len(self.body.equations) if user is None else self.place[id(user)]
        between = self.body.equations[self.place[id(e)] + 1 : end]
        return any(not shared.isdisjoint(a for a in x.operands if isinstance(a, int)) for x in between)


class InnerFunction:
    """A function nested in another one under construction.

    Its statements go to `block`, and `finish` writes the whole function into the outer block.
    """

    def __init__(self, outer: Block, preferred: str) -> None:
        self.outer, self.name = outer, outer.scope.new(preferred)
        self.scope = outer.scope.copy()
        self.block = Block(outer.module, self.scope, outer.indent + 4)

    def packed_parameter(self, preferred: str, names: Sequence[str]) -> tuple[str, list[str]]:
        """Return one parameter for several values, and the lines that unpack it."""
        if len(names) == 1:
            return names[0], []
        name = self.scope.new(preferred)
        return name, unpacked(names, name, self.block.indent) if names else []

    def finish(self, parameters: Sequence[str], unpacking: Sequence[str], results: Sequence[Code]) -> None:
        """Write the function into the outer block."""
        outer, statements = self.outer, self.block.lines
        before = [""] if outer.lines and outer.lines[-1] else []
        end = lines(packed(results), outer.indent + 4, "return ") if len(results) == 1 else returned(results, outer.indent + 4)
        gap = [""] if unpacking and statements and statements[0].lstrip().startswith("def ") else []
        head = definition(self.name, parameters, outer.indent)
        outer.lines += [*before, *head, *unpacking, *gap, *statements, *end, ""]


def program_operands(program: LocalProgram, codes: Sequence[Code]) -> list[Operand]:
    """Return the operands of a program, given an expression for each."""
    body, varying = program.body, program.varying
    return [Operand(c, body.tensors[v], axes) for c, v, axes in zip(codes, body.inputs, varying, strict=True)]


def printed(application: AppliedPrimitive) -> Code:
    """Return one application of a primitive as an expression.

    Raises:
        ExportError: the primitive or one of its parameters has no public name.
    """
    e, printer = application.equation, printer_of(application.equation)
    if printer is None:
        raise ExportError(e.source, e.name, "JAX has no public name for it")
    try:
        return printer(application)
    except NoPublicName as problem:
        raise ExportError(e.source, e.name, str(problem)) from None


def is_number(x: Operand) -> bool:
    """Return whether all elements of an operand are one constant number, which is written again at each use."""
    producer = x.producer
    return x.constant is not None or (
        producer is not None and producer.name == "broadcast_in_dim" and producer.operands[0].scalar is not None
    )


def with_bare_number(result: Operand) -> Operand:
    """Return an operand whose elements are one number, together with its form before the cast that makes it vary."""
    if not result.varying:
        return result
    bare = replace(result, varying=frozenset())
    code = call("lax.pcast", bare.code, axis_names(tuple(sorted(result.varying))), to="varying")
    return replace(result, code=code, bare=bare)


def without_implied_casts(name: str, operands: Sequence[Operand], varying: frozenset[str]) -> list[Operand]:
    """Return a function's operands without casts if the function inserts these itself, or else with all casts."""
    bare = [o.bare or o for o in operands]
    if name in AUTOMATIC and frozenset().union(*(o.varying for o in bare)) == varying:
        return bare
    return [replace(o, constant=None, producer=None) if o.bare is not None else o for o in operands]


def with_jax_constant(operands: Sequence[Operand]) -> Sequence[Operand]:
    """Return a function's operands. If all are constants, one becomes a JAX array, since NumPy would combine them while tracing."""
    first = next((k for k, o in enumerate(operands) if o.constant is not None and o.tensor.shape), None)
    if first is None or any(o.constant is None for o in operands):
        return operands
    array = replace(operands[first], code=call("jnp.asarray", operands[first].code))
    return [*operands[:first], array, *operands[first + 1 :]]


def varying_of_results(e: Equation) -> tuple[frozenset[str], ...]:
    """Return the mesh axes along which each result of an equation varies."""
    assert e.origin is not None
    return varying_of(e.origin.outvars)
