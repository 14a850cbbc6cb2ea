"""The module that an export writes: one function for each distinct program, arrays, and imports."""

from __future__ import annotations

import importlib
import operator
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.export.body_writer import Block, program_operands
from unity.export.derivative_rules import DerivativeRule
from unity.export.nested import nested_writer
from unity.export.primitives.primitive_call import array_code
from unity.export.primitives.public_names import ROUTED_PRODUCT
from unity.export.primitives.random_bits import PRIMITIVES_MODULE
from unity.export.primitives.table import CHECKPOINT_NAME, LAYOUT_CLASS, LAYOUT_FUNCTION
from unity.export.source_code import Code, Scope, call, definition, letters, lines, mapping, returned, sequence, unpacked
from unity.export.tracing import LocalProgram
from unity.pcg.ir.program import Literal
from unity.pcg.jaxprs.jaxprs import chosen_of
from unity.pcg.jaxprs.trace_contexts import words_of
from unity.pcg.operators.table.elementwise import ERROR_SLOPES
from unity.pcg.propagation.nested.derivative_rules import Flags
from unity.pcg.types.varying_axes import CAST

MAX_LITERAL = 24  # elements of an array that is written as a literal
MAX_WORDS = 4  # 32-bit words of random keys that are written as a literal: one key
NAME = "__name_of_function__"  # a placeholder for a function's name, about as long as names are, so that lines break alike
ONCE = "differentiated_once"
SYMBOLIC_ZERO = "SymbolicZero"
ONCE_FUNCTIONS = [
    ["@jax.custom_jvp", f"def {ONCE}(*values):", '    """The values, of which there is no derivative."""', "    return values"],
    [
        f"@{ONCE}.defjvp",
        f"def {ONCE}_jvp(primals, tangents):",
        "    raise NotImplementedError(",
        '        "a second derivative of a call whose derivative rule calls a function with another rule than its derivative;"',
        '        " take it of the original function"',
        "    )",
    ],
]
JAX_IMPORTS = [
    "import jax",
    "import jax.numpy as jnp",
    "import numpy as np",
    "from jax import lax",
    "from jax.sharding import AxisType, Mesh, NamedSharding",
    "from jax.sharding import PartitionSpec as P",
]


class ModuleWriter:
    """The functions and arrays of a file under construction."""

    def __init__(self) -> None:
        self.scope = Scope(("fn", "program", "ARRAYS", "array", CAST, "Primitive", "ad", "batching", "mlir", ONCE, SYMBOLIC_ZERO))
        self.functions: list[list[str]] = []
        self.names: dict[Hashable, str] = {}  # of functions and arrays, by content
        self.arrays: dict[str, np.ndarray] = {}
        self.user_imports: dict[tuple[str, str], str] = {}  # (module, name) of a user's function → its name in the file
        self.operator = "operator"  # the kind of operator that is being written
        self.in_rule = False  # whether a derivative rule is being written
        self.nested_writer = nested_writer  # a field, because nested.py imports body_writer.py, which calls it

    def constant(self, atom: Literal) -> Code:
        """Return a constant: as a literal, or as an array of the file beside."""
        if jnp.issubdtype(atom.tensor.dtype, jax.dtypes.extended):
            impl = str(jax.random.key_impl(atom.value))
            return Code(f'jax.random.wrap_key_data({self.numbers(words_of(atom.value), MAX_WORDS)}, impl="{impl}")')
        return self.numbers(np.asarray(atom.value, atom.tensor.dtype))

    def numbers(self, value: np.ndarray, most: int = MAX_LITERAL) -> Code:
        """Return an array of numbers: as a literal if it has at most `most` elements, or as an array of the file beside."""
        return array_code(value) if value.size <= most else self.stored(value)

    def stored(self, value: np.ndarray) -> Code:
        """Store an array in the file beside, and return the expression that reads it."""
        key = ("array", value.tobytes(), value.shape, str(value.dtype))
        name = self.names.get(key)
        if name is None:
            name = f"a{len(self.arrays)}"
            self.arrays[name] = value
            self.names[key] = name
        return Code(f'array("{name}")' + (".view(jnp.bfloat16)" if value.dtype == jnp.bfloat16 else ""))

    def imported(self, value: Any) -> Code | None:
        """Import a user's function or class, and return its name in the file, or None if no module has it by its name.

        A file cannot import from the program that was started (`__main__`).
        """
        name = getattr(value, "__qualname__", "")
        where = next((module for module in _modules_of(value) if _attribute_of(module, name) is value), None)
        if where is None:
            return None
        outermost, dot, rest = name.partition(".")
        if (where, outermost) not in self.user_imports:
            self.user_imports[where, outermost] = self.scope.new(outermost)
        return Code(f"{self.user_imports[where, outermost]}{dot}{rest}")

    def function(
        self,
        preferred: str,
        program: LocalProgram,
        decorators: Sequence[Code] = (),
        parameters: Sequence[str] = (),
        about: str = "",
    ) -> str:
        """Write a function that runs a program, unless an equal one exists, and return its name."""
        return self.add(preferred, [self.unnamed_function("", program, decorators, parameters, about)])

    def unnamed_function(
        self, ending: str, program: LocalProgram, decorators: Sequence[Code] = (), parameters: Sequence[str] = (), about: str = ""
    ) -> list[str]:
        """Return the lines of a function that runs a program, with `NAME` and an ending for its name."""
        scope = self.scope.within()
        parameters = [scope.new(p) for p in parameters or letters(len(program.varying))]
        block = Block(self, scope)
        results = block.write(program.body, program_operands(program, [Code(p) for p in parameters]), keep=True)
        return function_lines(ending, parameters, block.lines, [r.code for r in results], decorators, about)

    def add(self, preferred: str, functions: Sequence[Sequence[str]]) -> str:
        """Add functions that share a name, unless there are equal ones, and return the name."""
        key = ("functions", preferred, *map(tuple, functions))
        if key not in self.names:
            name = self.names[key] = self.scope.new(preferred)
            self.functions += [[line.replace(NAME, name) for line in f] for f in functions]
        return self.names[key]

    def error_function(self, primitive: str) -> str:
        """Write an error function with a custom derivative, unless it exists, and return its name.

        Derivative rules call it, since a second derivative of theirs would be JAX's, and that of JAX 0.12 fails inside a shard_map.
        """
        value = ["@jax.custom_jvp", f"def {NAME}(x):", f"    return lax.{primitive}(x)"]
        results = f"{NAME}(x), x_dot * {ERROR_SLOPES[primitive]} * jnp.exp(-x * x)"
        rule = [f"@{NAME}.defjvp", f"def {NAME}_jvp(primals, tangents):", "    (x,), (x_dot,) = primals, tangents"]
        return self.add(primitive, [value, [*rule, f"    return {results}"]])

    def custom_derivative(self, rule: DerivativeRule) -> str:
        """Write a function with its custom derivative rule, unless an equal one exists, and return its name."""
        if rule.once and ONCE_FUNCTIONS[0] not in self.functions:
            self.functions += ONCE_FUNCTIONS
        slices = any(e.name == "axis_index" for e in rule.value.body.equations)
        preferred = "slice_here" if slices else self.operator
        if rule.derivative is not None:
            value = self.unnamed_function("", rule.value, [Code("jax.custom_jvp")])
            with self._within_rule():
                return self.add(preferred, [value, *self._jvp_rules(rule.derivative, rule)])
        assert rule.forward is not None
        assert rule.backward is not None
        value = self.unnamed_function("", rule.value, [Code("jax.custom_vjp")])
        with self._within_rule():
            passes = [self._forward_rule(rule.forward, rule), *self._backward_rules(rule.backward, rule)]
        options = ", symbolic_zeros=True" if rule.asks else ""
        return self.add(preferred, [value, *passes, [f"{NAME}.defvjp({NAME}_fwd, {NAME}_bwd{options})"]])

    @contextmanager
    def _within_rule(self) -> Iterator[None]:
        """Write what follows as a part of a derivative rule."""
        self.in_rule = True
        try:
            yield
        finally:
            self.in_rule = False

    def _jvp_rules(self, program: LocalProgram, rule: DerivativeRule) -> list[list[str]]:
        """Return the rule of a `custom_jvp`: one function, or if it asks where tangents are zero, one for each set of operands."""
        if not rule.asks:
            return [self._jvp_rule(program, rule, rule.floating, "", [Code(f"{NAME}.defjvp")])]
        each = rule.each(rule.floating, program)
        functions = [self._jvp_rule(p, rule, active, f"_{k}") for k, (active, p) in enumerate(each.items())]
        sets = [chosen_of(rule.floating, active) for active in each]
        decorator = call("partial", Code(f"{NAME}.defjvp"), symbolic_zeros=True)
        return [*functions, _choice("_jvp", ["primals", "tangents"], rule.floating, sets, [decorator])]

    def _jvp_rule(
        self, program: LocalProgram, rule: DerivativeRule, active: Flags, ending: str, decorators: Sequence[Code] = ()
    ) -> list[str]:
        """Return the rule of a `custom_jvp` for the tangents of the active operands."""
        scope = self.scope.within()
        primals = [scope.new(p) for p in letters(len(active))]
        all_tangents = [scope.new(f"{p}_dot") if f else "_" for p, f in zip(primals, active, strict=True)]
        block = Block(self, scope)
        block.lines += [*unpacked(primals, "primals", 4), *unpacked(all_tangents, "tangents", 4)]
        block.lines += _once(primals) if rule.once else []
        operands = [Code(name) for name in (*primals, *all_tangents) if name != "_"]
        results = [r.code for r in block.write(program.body, program_operands(program, operands))]
        n = len(results) // 2
        pair = [_one_or_tuple(results[:n]), _one_or_tuple(results[n:])]
        return function_lines(f"_jvp{ending}", ["primals", "tangents"], block.lines, pair, decorators)

    def _forward_rule(self, program: LocalProgram, rule: DerivativeRule) -> list[str]:
        """Return the forward rule of a `custom_vjp`, which returns the results and the residuals."""
        scope, count = self.scope.within(), len(rule.value.body.outputs)
        primals = [scope.new(p) for p in letters(len(rule.floating))]
        block = Block(self, scope)
        block.lines += unpacked(primals, str(sequence([Code(f"{p}.value") for p in primals])), 4) if rule.asks else []
        block.lines += _once(primals) if rule.once else []
        results = [r.code for r in block.write(program.body, program_operands(program, list(map(Code, primals))))]
        residuals = sequence(results[count:]) if results[count:] else Code("None")
        return function_lines("_fwd", primals, block.lines, [_one_or_tuple(results[:count]), residuals])

    def _backward_rules(self, program: LocalProgram, rule: DerivativeRule) -> list[list[str]]:
        """Return the backward rule of a `custom_vjp`: one function, or one for each set of results that have a cotangent."""
        everything = (True,) * len(rule.value.body.outputs)
        if not rule.asks:
            return [self._backward_rule(program, rule, everything)]
        each = rule.each(everything, program)
        functions = [self._backward_rule(p, rule, nonzero, f"_{k}") for k, (nonzero, p) in enumerate(each.items())]
        return [*functions, _choice("_bwd", ["kept", "cotangents"], everything, list(each))]

    def _backward_rule(self, program: LocalProgram, rule: DerivativeRule, nonzero: Flags, ending: str = "") -> list[str]:
        """Return the backward rule of a `custom_vjp` for the nonzero cotangents: those of the floating-point operands."""
        scope, count = self.scope.within(), len(nonzero)
        residuals, cotangents = scope.new("kept"), scope.new("cotangents" if count > 1 else "cotangent")
        each_residual = [scope.new("saved") for _ in program.varying[sum(nonzero) :]]
        each_cotangent = [scope.new("cotangent") if flag else "_" for flag in nonzero] if count > 1 else [cotangents]
        block = Block(self, scope)
        block.lines += unpacked(each_residual, residuals, 4) if each_residual else []
        block.lines += unpacked(each_cotangent, cotangents, 4) if count > 1 else []
        names = [*each_residual, *chosen_of(nonzero, each_cotangent)]
        block.lines += _once(names) if rule.once else []
        results = iter(r.code for r in block.write(program.body, program_operands(program, list(map(Code, names)))))
        gradients = sequence([next(results) if f else Code("None") for f in rule.floating])
        return function_lines(f"_bwd{ending}", [residuals if each_residual else "_", cotangents], block.lines, [gradients])


def _choice(
    ending: str, parameters: list[str], flags: Flags, sets: Sequence[Sequence[bool]], decorators: Sequence[Code] = ()
) -> list[str]:
    """Return a rule that calls the function with the number of the set of nonzero values among those of its last parameter."""
    value = parameters[-1]
    chosen = Code(value) if all(flags) else sequence([Code(f"{value}[{k}]") for k, flag in enumerate(flags) if flag])
    table = mapping((str(tuple(s)), Code(f"{NAME}{ending}_{k}")) for k, s in enumerate(sets))
    statements = [
        *lines(table, 4, "rules = "),
        *lines(Code(f"tuple(type(x) is not {SYMBOLIC_ZERO} for x in {chosen})"), 4, "nonzero = "),
        "    if nonzero not in rules:",
        f'        raise NotImplementedError(f"no rule for nonzero {value} {{nonzero}}")',
    ]
    return function_lines(ending, parameters, statements, [Code(f"rules[nonzero]({', '.join(parameters)})")], decorators)


def function_lines(
    ending: str,
    parameters: Sequence[str],
    statements: Sequence[str],
    results: Sequence[Code],
    decorators: Sequence[Code] = (),
    about: str = "",
) -> list[str]:
    """Return the lines of a function, with `NAME` and an ending for its name, and `about` as its docstring."""
    head = [line for d in decorators for line in lines(d, 0, "@")] + definition(NAME + ending, parameters)
    doc = [f'    """{about}"""'] if about else []
    gap = 1 if statements and not statements[0] else 0
    return [*head, *doc, *statements[gap:], *returned(results, 4)]


def _once(names: Sequence[str]) -> list[str]:
    """Return the lines that refuse a second derivative of values."""
    return unpacked(names, str(call(ONCE, *map(Code, names))), 4)


def _one_or_tuple(results: Sequence[Code]) -> Code:
    return results[0] if len(results) == 1 else sequence(results)


def _modules_of(value: Any) -> Iterator[str]:
    """Yield the modules that may have a function or a class, public ones first: packages show in them what private ones define."""
    where = getattr(value, "__module__", None) or "__main__"
    if where != "__main__":
        yield ".".join(part for part in where.split(".") if not part.startswith("_"))
        yield where.partition(".")[0]
        yield where


def _attribute_of(module: str, name: str) -> object:
    """Return what a module has by a name, or None."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError, ValueError):
        return None


def imports(module: ModuleWriter) -> tuple[list[str], list[str]]:
    """Return the import lines of a file, in the order of linters: of the standard library, and of everything else."""
    text = "\n".join(line for f in module.functions for line in f)
    of_users = list(_user_import_lines(module))
    of_python = [line for line in of_users if _imported_module(line).partition(".")[0] in sys.stdlib_module_names]
    standard = ["import re", *(["from functools import partial"] if "partial(" in text else []), *of_python]
    standard += ["from pathlib import Path"] if module.arrays else []
    others = [*JAX_IMPORTS, *(line for line in of_users if line not in of_python)]
    binds_primitive = re.search(rf"\b{PRIMITIVES_MODULE}\.\w+_p\.bind\(", text)
    others += [f"from jax.custom_derivatives import {SYMBOLIC_ZERO}"] if f"is not {SYMBOLIC_ZERO} " in text else []
    others += [f"from jax.ad_checkpoint import {CHECKPOINT_NAME}"] if f"{CHECKPOINT_NAME}(" in text else []
    others += [f"from jax.experimental.layout import {LAYOUT_CLASS}, {LAYOUT_FUNCTION}"] if f"{LAYOUT_FUNCTION}(" in text else []
    casts = f"{CAST}.bind(" in text
    routed = f"{ROUTED_PRODUCT}.bind(" in text
    standard += ["from typing import Any, NamedTuple"] if routed else []
    others += ["from jax.extend import core"] if routed else []
    core = [*(["Primitive"] if casts else []), *([PRIMITIVES_MODULE] if binds_primitive else [])]
    others += [f"from jax.extend.core import {', '.join(core)}"] if core else []
    others += ["from jax.interpreters import ad, batching, mlir"] if casts or routed else []
    return _in_order(standard), _in_order(others)


def _user_import_lines(module: ModuleWriter) -> Iterable[str]:
    """Yield one line for each module of the user's, and one for each function that has another name in the file."""
    plain: dict[str, list[str]] = {}
    for (where, name), here in module.user_imports.items():
        if name == here:
            plain.setdefault(where, []).append(name)
    for where, names in plain.items():
        yield f"from {where} import {', '.join(sorted(names, key=_sort_key))}"
    yield from (f"from {where} import {name} as {here}" for (where, name), here in module.user_imports.items() if name != here)


def _sort_key(name: str) -> tuple[int, str]:
    """Return a key that sorts constants first, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _in_order(lines: list[str]) -> list[str]:
    return sorted(lines, key=lambda line: (line.startswith("from"), _imported_module(line).lower()))


def _imported_module(line: str) -> str:
    return line.split()[1]
