"""A local program as the statements of one function: short expressions go where they are used, the others get a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unity.export.applied import Applied, Operand
from unity.export.collectives import COLLECTIVES, names
from unity.export.errors import ExportError
from unity.export.primitives import BESIDE, REDUCING
from unity.export.public import Unsaid, printer_of
from unity.export.simplify import simplified, through
from unity.export.source import Code, Names, assign, call, first_of
from unity.export.tracing import varying_of
from unity.pcg.ir.program import Atom, Body, Equation

if TYPE_CHECKING:
    from unity.export.module import Module

SHORT = 44  # characters of an expression that is written where it is used
LONGER = 72  # of one that becomes part of its only user's own form, or is returned
AUTOMATIC = BESIDE | {  # functions that make all of their operands vary alike
    "select_n", "clamp", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "dot_general",
    "conv_general_dilated", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max",
}  # fmt: skip
CALLED = {
    "add": "plus", "add_any": "plus", "sub": "minus", "mul": "times", "div": "ratio", "reduce_sum": "total",
    "reduce_max": "largest", "reduce_min": "smallest", "dot_general": "product", "select_n": "chosen",
    "integer_pow": "power", "broadcast_in_dim": "spread",
    "convert_element_type": "converted", "conv_general_dilated": "convolved", "pvary": "varying", "max": "larger", "min": "smaller",
    "dynamic_slice": "part", "slice": "part", "iota": "positions", "psum": "reduced", "psum_invariant": "reduced",
    "all_gather": "gathered", "all_gather_invariant": "gathered", "reduce_scatter": "scattered", "all_to_all": "exchanged",
    "random_bits": "bits", "scatter-add": "added", "neg": "negative", "reduce_window_max": "pooled", "reduce_window_sum": "pooled",
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"), "mask"),
    "ppermute": "received",
}  # fmt: skip


class Block:
    """The statements of one function, as they are written."""

    def __init__(self, module: Module, scope: Names, indent: int = 4) -> None:
        self.module, self.scope, self.indent = module, scope, indent
        self.lines: list[str] = []

    def write(self, body: Body, operands: Sequence[Operand], keep: bool = False) -> list[Operand]:
        """Writes a program's statements, and gives its results. `keep`: they may be longer, as nothing is put around them."""
        return Writing(self, simplified(body), operands, keep).run()

    def let(self, wanted: Sequence[str], value: Code) -> list[Code]:
        """Assigns; gives the names."""
        chosen = ["_" if w == "_" else self.scope.new(w) for w in wanted]
        self.lines += assign(chosen, value, self.indent)
        return [Code(name) for name in chosen]

    def named(self, operand: Operand, wanted: str) -> Operand:
        """An operand that is a name (or a constant): what loops read must not be computed in them."""
        if operand.code.text.isidentifier() or (operand.constant is not None and operand.bare is None):
            return operand
        return replace(operand, code=self.let([wanted], operand.code)[0], maker=None, bare=None, constant=None)


class Writing:
    """One program being written into a block."""

    def __init__(self, block: Block, body: Body, operands: Sequence[Operand], keep: bool) -> None:
        self.block, self.body, self.keep = block, body, keep
        self.env: dict[int, Operand] = dict(zip(body.inputs, operands, strict=True))
        self.uses = Counter(a for e in body.equations for a in e.operands if isinstance(a, int))
        self.uses.update(a for a in body.outputs if isinstance(a, int))
        self.users = {a: e for e in body.equations for a in e.operands if isinstance(a, int)}
        self.maker = {v: e for e in body.equations for v in e.results}
        self.place = {id(e): k for k, e in enumerate(body.equations)}
        self.reads: dict[int, set[int]] = {}  # by what is written where it is used

    def run(self) -> list[Operand]:
        from unity.export.nested import nested_writer  # which writes programs into blocks, as this does

        for e in self.body.equations:
            nested = nested_writer(e)
            if nested is not None:
                results = nested(self, e)
                tensors = [self.body.tensors[v] for v in e.results]
                found = zip(e.results, results, tensors, results_vary(e), strict=True)
                self.env.update((v, Operand(c, t, names)) for v, c, t, names in found)
            else:
                self.apply(e)
        return [self.read(a) for a in self.body.outputs]

    def read(self, atom: Atom) -> Operand:
        if isinstance(atom, int):
            return self.env[atom]
        return Operand(self.block.module.constant(atom), atom.tensor, constant=atom)

    def apply(self, e: Equation) -> None:
        operands = [self.read(a) for a in e.operands]
        tensors, varying = [self.body.tensors[v] for v in e.results], results_vary(e)
        applied = Applied(e, tuple(computed(settled(e.name, operands, varying[0]))), tuple(tensors))
        code = printed(applied)
        if e.primitive.multiple_results and len(tensors) > 1:
            wanted = [CALLED.get(e.name, e.name) if self.uses[v] else "_" for v in e.results]
            found = self.block.let(wanted, code)
            self.env.update((v, Operand(c, t, n)) for v, c, t, n in zip(e.results, found, tensors, varying, strict=True))
            return
        if e.primitive.multiple_results:
            code = first_of(code)
        (v,) = e.results
        result = Operand(code, tensors[0], varying[0], maker=applied)
        if e.name == "pvary" and (fixed(operands[0]) or operands[0].bare or not tensors[0].floating):
            bare = operands[0].bare or operands[0]
            result = replace(result, constant=operands[0].constant, maker=operands[0].maker, bare=bare)
        elif fixed(result):
            result = everywhere(result)
        elif not self.inline(v, e, code):
            result = replace(result, code=self.block.let([CALLED.get(e.name, e.name)], code)[0], maker=None)
        self.env[v] = result

    def inline(self, v: int, e: Equation, code: Code) -> bool:
        """Whether an expression is written where it is used."""
        user = self.users.get(v)
        self.reads[v] = {b for a in e.operands if isinstance(a, int) for b in self.reads.get(a, {a})}
        if not self.written_here(v, e, user, code):
            self.reads[v] = {v}
            return False
        return True

    def written_here(self, v: int, e: Equation, user: Equation | None, code: Code) -> bool:
        if self.uses[v] != 1 or self.overtakes(v, e, user) or (e.name in COLLECTIVES and not (user is None and self.keep)):
            return False
        if user is not None and user.name == "cond" and user.operands[0] == v and self.truth(v) is not None:
            return True  # which takes the truth itself
        if user is None:
            return len(code.text) <= (LONGER if self.keep else SHORT) or (self.keep and bool(code.items))
        from unity.export.nested import LOOPS

        part = (e.name in REDUCING and user.name == "broadcast_in_dim") or (e.name == "broadcast_in_dim" and user.name in BESIDE)
        return user.name not in LOOPS and len(code.text) <= (LONGER if part else SHORT)

    def truth(self, atom: Atom) -> Atom | None:
        """The boolean that a branch's number is, if it is one."""
        made = self.maker.get(a) if isinstance(a := through(atom, self.maker), int) else None
        if made is None or made.name != "convert_element_type" or self.body.tensor(made.operands[0]).dtype != bool:
            return None
        return made.operands[0]

    def platforms(self, atom: Atom) -> tuple[tuple[str, ...] | None, ...] | None:
        """The platforms that a branch's number tells apart, if it is the number of one; None is any other."""
        made = self.maker.get(a) if isinstance(a := through(atom, self.maker), int) else None
        return None if made is None or made.name != "platform_index" else made.params["platforms"]

    def overtakes(self, v: int, e: Equation, user: Equation | None) -> bool:
        """Whether `v`, computed later, would read a value after others that it was read before: gradients are added in that order.

        Of two summands the order does not matter.
        """
        several = {a for a in self.reads[v] if self.uses[a] + (a in self.body.inputs) > 2 and self.body.tensors[a].floating}
        end = len(self.body.equations) if user is None else self.place[id(user)]
        between = self.body.equations[self.place[id(e)] + 1 : end]
        return any(not several.isdisjoint(a for a in x.operands if isinstance(a, int)) for x in between)


def printed(applied: Applied) -> Code:
    """One application as an expression. Raises ExportError where it has no public name."""
    e, printer = applied.equation, printer_of(applied.equation)
    if printer is None:
        raise ExportError(e.source, e.name, "JAX has no public name for it")
    try:
        return printer(applied)
    except Unsaid as problem:
        raise ExportError(e.source, e.name, str(problem)) from None


def fixed(x: Operand) -> bool:
    """Whether an operand is one number, everywhere: it is written again wherever it is used."""
    made = x.maker
    return x.constant is not None or (made is not None and made.name == "broadcast_in_dim" and made.operands[0].scalar is not None)


def everywhere(result: Operand) -> Operand:
    """One number everywhere, also before it was made to vary."""
    if not result.varying:
        return result
    bare = replace(result, varying=frozenset())
    return replace(result, code=varied(bare.code, result.varying), bare=bare)


def varied(x: Code, axes: frozenset[str]) -> Code:
    """An expression made to vary along axes."""
    return call("lax.pcast", x, names(tuple(sorted(axes))), to="varying")


def settled(name: str, operands: Sequence[Operand], varying: frozenset[str]) -> list[Operand]:
    """Operands as they are given to a function: bare, if it makes them vary itself; otherwise exactly as they are."""
    bare = [o.bare or o for o in operands]
    if name in AUTOMATIC and frozenset().union(*(o.varying for o in bare)) == varying:
        return bare
    return [replace(o, constant=None, maker=None) if o.bare is not None else o for o in operands]


def computed(operands: Sequence[Operand]) -> Sequence[Operand]:
    """Operands as they are given to a function. Of constants alone numpy would compute it while it is traced: one is made JAX's."""
    first = next((k for k, o in enumerate(operands) if o.constant is not None and o.tensor.shape), None)
    if first is None or any(o.constant is None for o in operands):
        return operands
    whole = replace(operands[first], code=call("jnp.asarray", operands[first].code))
    return [*operands[:first], whole, *operands[first + 1 :]]


def results_vary(e: Equation) -> tuple[frozenset[str], ...]:
    """The axes along which the results of an equation differ."""
    assert e.origin is not None
    return varying_of(e.origin.outvars)
