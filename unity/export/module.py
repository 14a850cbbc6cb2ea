"""The functions of the exported file: each different program is written once, and called by name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from unity.export.applied import array_code
from unity.export.block import Block
from unity.export.inner import inputs_of
from unity.export.rules import Rule
from unity.export.source import Code, Names, definition, lines, returned, sequence, unpacked
from unity.export.tracing import Program
from unity.pcg.ir.program import Literal
from unity.pcg.types.varying_axes import CAST

LARGEST = 24  # elements of an array that is written as a literal
NAME = "__name_of_function__"  # as long as names are, so that lines stay as they are
LETTERS = ("x", "y", "z", "u", "v")


class Module:
    """The functions and arrays of a file, as they are written."""

    def __init__(self) -> None:
        self.scope = Names(("fn", "program", "ARRAYS", "array", CAST, "Primitive", "mlir"))
        self.functions: list[list[str]] = []
        self.known: dict[Hashable, str] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.imports: dict[tuple[str, str], str] = {}  # functions of the user's by module and name → what they are called here
        self.operator = "operator"  # the one that is being written

    def constant(self, atom: Literal) -> Code:
        """A constant: a literal, or an array of the file beside."""
        if jnp.issubdtype(atom.tensor.dtype, jax.dtypes.extended):
            impl = str(jax.random.key_impl(atom.value))
            data = np.asarray(jax.random.key_data(atom.value))
            return Code(f'jax.random.wrap_key_data({array_code(data)}, impl="{impl}")')
        value = np.asarray(atom.value, atom.tensor.dtype)
        return array_code(value) if value.size <= LARGEST else self.stored(value)

    def stored(self, value: np.ndarray) -> Code:
        """An array that is kept in the file beside."""
        name = self.known.get(("array", value.tobytes(), value.shape, str(value.dtype)))
        if name is None:
            name = f"a{len(self.arrays)}"
            self.arrays[name] = value
            self.known["array", value.tobytes(), value.shape, str(value.dtype)] = name
        return Code(f'array("{name}")' + (".view(jnp.bfloat16)" if value.dtype == jnp.bfloat16 else ""))

    def imported(self, module: str, name: str) -> Code:
        """A function of the user's, or a class of theirs, by the name under which the file imports it."""
        if (module, name) not in self.imports:
            self.imports[module, name] = self.scope.new(name)
        return Code(self.imports[module, name])

    def function(
        self, wanted: str, program: Program, decorators: Sequence[Code] = (), parameters: Sequence[str] = (), about: str = ""
    ) -> str:
        """The name of a function that runs a program; written, if it is not there yet."""
        return self.add(wanted, [self.written("", program, decorators, parameters, about)])

    def written(
        self, ending: str, program: Program, decorators: Sequence[Code] = (), parameters: Sequence[str] = (), about: str = ""
    ) -> list[str]:
        """A program as a function without a name."""
        scope = self.scope.within()
        given = [scope.new(p) for p in parameters or letters(len(program.varying))]
        block = Block(self, scope)
        results = block.write(program.body, inputs_of(program, [Code(p) for p in given]), keep=True)
        return drawn(ending, given, block.lines, [r.code for r in results], decorators, about)

    def add(self, wanted: str, functions: Sequence[Sequence[str]]) -> str:
        """Adds functions that have a name together, unless there are such; gives the name."""
        key = ("functions", wanted, *map(tuple, functions))
        if key not in self.known:
            name = self.known[key] = self.scope.new(wanted)
            self.functions += [[line.replace(NAME, name) for line in f] for f in functions]
        return self.known[key]

    def custom(self, rule: Rule) -> str:
        """The name of a function with a derivative of its own."""
        slices = any(e.name == "axis_index" for e in rule.value.body.equations)
        wanted = "slice_here" if slices else self.operator
        if rule.derivative is not None:
            value = self.written("", rule.value, [Code("jax.custom_jvp")])
            return self.add(wanted, [value, self.derivative(rule.derivative, rule)])
        assert rule.forward is not None
        assert rule.backward is not None
        value = self.written("", rule.value, [Code("jax.custom_vjp")])
        passes = [self.first_pass(rule.forward, rule), self.second_pass(rule.backward, rule)]
        return self.add(wanted, [value, *passes, [f"{NAME}.defvjp({NAME}_fwd, {NAME}_bwd)"]])

    def derivative(self, program: Program, rule: Rule) -> list[str]:
        """The rule of a `custom_jvp`."""
        scope = self.scope.within()
        primals = [scope.new(p) for p in letters(len(rule.floating))]
        all_tangents = [scope.new(f"{p}_dot") if f else "_" for p, f in zip(primals, rule.floating, strict=True)]
        block = Block(self, scope)
        block.lines += [*unpacked(primals, "primals", 4), *unpacked(all_tangents, "tangents", 4)]
        given = [Code(name) for name in (*primals, *all_tangents) if name != "_"]
        results = [r.code for r in block.write(program.body, inputs_of(program, given))]
        n = len(results) // 2
        both = [_one(results[:n]), _one(results[n:])]
        return drawn("_jvp", ["primals", "tangents"], block.lines, both, [Code(f"{NAME}.defjvp")])

    def first_pass(self, program: Program, rule: Rule) -> list[str]:
        """The forward rule of a `custom_vjp`: results, and what is kept."""
        scope, count = self.scope.within(), len(rule.value.body.outputs)
        primals = [scope.new(p) for p in letters(len(rule.floating))]
        block = Block(self, scope)
        results = [r.code for r in block.write(program.body, inputs_of(program, list(map(Code, primals))))]
        kept = sequence(results[count:]) if results[count:] else Code("None")
        return drawn("_fwd", primals, block.lines, [_one(results[:count]), kept])

    def second_pass(self, program: Program, rule: Rule) -> list[str]:
        """The backward rule of a `custom_vjp`: gradients of the floating operands."""
        scope, count = self.scope.within(), len(rule.value.body.outputs)
        kept, given = scope.new("kept"), scope.new("cotangents" if count > 1 else "cotangent")
        saved = [scope.new("saved") for _ in program.varying[count:]]
        each = [scope.new("cotangent") for _ in range(count)] if count > 1 else [given]
        block = Block(self, scope)
        block.lines += unpacked(saved, kept, 4) if saved else []
        block.lines += unpacked(each, given, 4) if count > 1 else []
        results = block.write(program.body, inputs_of(program, list(map(Code, (*saved, *each)))))
        found = iter(r.code for r in results)
        gradients = sequence([next(found) if f else Code("None") for f in rule.floating])
        return drawn("_bwd", [kept if saved else "_", given], block.lines, [gradients])


def drawn(
    ending: str,
    parameters: Sequence[str],
    statements: Sequence[str],
    results: Sequence[Code],
    decorators: Sequence[Code] = (),
    about: str = "",
) -> list[str]:
    """The lines of a function that has no name yet."""
    head = [line for d in decorators for line in lines(d, 0, "@")] + definition(NAME + ending, parameters)
    doc = [f'    """{about}"""'] if about else []
    gap = 1 if statements and not statements[0] else 0
    return [*head, *doc, *statements[gap:], *returned(results, 4)]


def letters(count: int) -> list[str]:
    """Names for parameters of which nothing is known."""
    return [LETTERS[k % len(LETTERS)] for k in range(count)]


def _one(results: Sequence[Code]) -> Code:
    return results[0] if len(results) == 1 else sequence(results)
