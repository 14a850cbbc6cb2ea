"""Source of equations with nested programs: loops, branches, reductions, checkpoints, custom derivatives.

Loops, branches and combiners become inner functions; checkpoints and functions with custom derivatives become functions of the
module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend import core

from unity.base.errors import ExportError
from unity.export.body_writer import Block, BodyWriter, InnerFunction, program_operands
from unity.export.callbacks import pure_callback
from unity.export.checkpoint_policies import policy_code
from unity.export.derivative_rules import rule_of
from unity.export.primitives.indexing import index_parameters, scatter_dimensions
from unity.export.primitives.primitive_call import Operand
from unity.export.source_code import WIDTH, Code, call, letters, lines, literal, packed, packed_targets, sequence, stem, unpacked
from unity.export.tracing import LocalProgram, closed, varying_of
from unity.pcg.ir.program import Equation
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, RULED
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.propagation.nested.linear_solves import is_symmetric, program_names, split_operands
from unity.pcg.propagation.nested.programs import nested_body


def nested_program(e: Equation) -> LocalProgram:
    """Return the one nested program of an equation."""
    body = nested_body(e)
    jaxpr = next(p for p in (getattr(p, "jaxpr", p) for p in e.params.values()) if isinstance(p, core.Jaxpr))
    return LocalProgram(body, varying_of(jaxpr.invars))


def scan(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a scan. Its step is an inner function, which reads the constants from the scope around it."""
    program = nested_program(e)
    step_operands = program_operands(program, [Code("")] * len(program.varying))
    operands = [writer.read(a) for a in e.operands]
    loop = ScanLoop(constants_and_carry(e.params), e.params["length"], e.params["reverse"], e.params["unroll"])

    def write_step(block: Block, operands: list[Operand]) -> list[Code]:
        return [o.code for o in block.write(program.body, operands)]

    return loop.write(writer.block, operands, step_operands, write_step)


@dataclass(frozen=True)
class ScanLoop:
    """A scan. `parts` are the numbers of its operands that are constants, and that are carried."""

    parts: tuple[int, int]
    length: int
    reverse: bool = False
    unroll: int | bool = 1

    def write(
        self,
        block: Block,
        operands: Sequence[Operand],
        step_operands: Sequence[Operand],
        write_step: Callable[[Block, list[Operand]], list[Code]],
    ) -> list[Code]:
        """Write the scan into a block, and return its results.

        Args:
            block: the block.
            operands: the operands: constants, carry, rows.
            step_operands: the operands as one step sees them.
            write_step: writes the statements of one step into a block, and returns its results.
        """
        c, k = self.parts
        operands = [block.named(o, stem(o.code)) for o in operands]
        inner = InnerFunction(block, "step")
        carry = [inner.scope.new("carried") for _ in range(k)]
        rows = [inner.scope.new(stem(o.code)) for o in operands[c + k :]]
        first, unpack_carry = inner.packed_parameter("carry", carry)
        second, unpack_rows = inner.packed_parameter("rows", rows)
        inner_operands = [replace(s, code=Code(name)) for s, name in zip(step_operands[c:], (*carry, *rows), strict=True)]
        results = write_step(inner.block, [*operands[:c], *inner_operands])
        inner.finish([first, second], [*unpack_carry, *unpack_rows], [packed(results[:k]), packed(results[k:])])
        names = [block.scope.new("carried" if i < k else "rows") for i in range(len(results))]
        self._assign(block, names[:k], names[k:], self._call(inner.name, [o.code for o in operands]))
        return [Code(name) for name in names]

    def _call(self, step: str, codes: list[Code]) -> Code:
        c, k = self.parts
        options: dict[str, object] = {"reverse": True} if self.reverse else {}
        options |= {} if self.unroll is False or (self.unroll == 1 and self.unroll is not True) else {"unroll": self.unroll}
        return call("lax.scan", Code(step), packed(codes[c : c + k]), packed(codes[c + k :]), length=self.length, **options)

    def _assign(self, block: Block, carry: list[str], rows: list[str], loop: Code) -> None:
        """Assign a scan's results: in one statement, or if there are many, packed first."""
        targets = f"{packed_targets(carry)}, {packed_targets(rows)} = "
        if len(targets) <= WIDTH // 2:
            block.lines += lines(loop, block.indent, targets)
            return
        for value, names in zip(block.let(["last", "rows"], loop), (carry, rows), strict=True):
            block.lines += [] if not names else unpacked(names, value.text, block.indent)
            if len(names) == 1:  # a single value is not packed
                block.lines[-1] = f"{' ' * block.indent}{names[0]} = {value}"


def while_loop(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a while loop. Its predicate and its step are inner functions."""
    a, b = e.params["cond_nconsts"], e.params["body_nconsts"]
    operands = [writer.block.named(writer.read(x), "given") for x in e.operands]
    n, functions = len(operands) - a - b, []
    for key, consts, preferred in (("cond_jaxpr", operands[:a], "more"), ("body_jaxpr", operands[a : a + b], "step")):
        program = closed(e.params[key])
        inner = InnerFunction(writer.block, preferred)
        carry = [inner.scope.new("carried") for _ in range(n)]
        parameter, unpack = inner.packed_parameter("carry", carry)
        inner_operands = _with_constants(program, consts, [Code(name) for name in carry])
        results = [o.code for o in inner.block.write(program.body, inner_operands)]
        inner.finish([parameter], unpack, [packed(results)])
        functions.append(Code(inner.name))
    start = packed([o.code for o in operands[a + b :]])
    names = ["looped" if writer.uses[v] else "_" for v in e.results]
    return writer.block.let(names, call("lax.while_loop", *functions, start))


def _with_constants(program: LocalProgram, constants: Sequence[Operand], codes: Sequence[Code]) -> list[Operand]:
    """Return the operands of a program whose first ones are constants from the scope around it."""
    operands = program_operands(program, [*(o.code for o in constants), *codes])
    operands[: len(constants)] = [Operand(o.code, o.tensor, o.varying, o.constant) for o in constants]
    return operands


def cond(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a conditional. Its branches are inner functions of the same operands."""
    branch_index = e.operands[0]
    codes = [writer.read(a).code for a in e.operands[1:]]
    branches = []
    for k, program in enumerate(map(closed, e.params["branches"])):
        inner = InnerFunction(writer.block, f"branch_{k}")
        parameters = [inner.scope.new(letter) for letter in letters(len(codes))]
        results = inner.block.write(program.body, program_operands(program, [Code(p) for p in parameters]))
        inner.finish(parameters, [], [packed([o.code for o in results])])
        branches.append(Code(inner.name))
    predicate, platforms = writer.predicate(branch_index), writer.platforms(branch_index)
    if platforms is not None:
        by_platform = {name: code for names, code in zip(platforms, branches, strict=True) for name in names or ("default",)}
        value = call("lax.platform_dependent", *codes, **by_platform)
    elif predicate is not None and len(branches) == 2:
        value = call("lax.cond", writer.read(predicate).code, branches[1], branches[0], *codes)
    else:
        value = call("lax.switch", writer.read(branch_index).code, sequence(branches, "[]"), *codes)
    return writer.block.let(["either"] * len(e.results), value)


def checkpoint(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a `jax.checkpoint`, as a function of the module."""
    operands = [writer.read(a) for a in e.operands]
    module, decorator = writer.block.module, checkpoint_decorator(e.params["prevent_cse"], policy_code(e))
    name = module.function(f"{module.operator}_again", nested_program(e), [decorator])
    return writer.block.let(["result"] * len(e.results), call(name, *(o.code for o in operands)))


def checkpoint_decorator(prevent_cse: bool, policy: Code | None) -> Code:
    """Return the decorator of a function under `jax.checkpoint`."""
    options: dict[str, object] = {} if prevent_cse else {"prevent_cse": False}
    options |= {} if policy is None else {"policy": policy}
    return call("partial", Code("jax.checkpoint"), **options) if options else Code("jax.checkpoint")


def custom_derivative(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a call with a custom derivative rule, as a function of the module with its rule."""
    name = writer.block.module.custom_derivative(rule_of(e))
    value = call(name, *(writer.read(a).code for a in e.operands))
    if len(e.results) == 1 and writer.is_inlined(e.results[0], e, value):
        return [value]
    return writer.block.let(["result"] * len(e.results), value)


def platform_index(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write nothing: the conditional that takes the index of the platform names the platforms."""
    return [Code("platform")]


def refused(writer: BodyWriter, e: Equation) -> list[Code]:
    """Refuse an equation that no public function is known to write."""
    raise ExportError(e.source, e.name, "programs inside of it are not written yet")


def combiner(e: Equation) -> LocalProgram:
    """Return the program by which a general reduction combines two values."""
    jaxpr = e.params["jaxpr"]
    return closed(jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, e.params.get("consts", ())))


def reduction(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a general reduction of whole dimensions or of windows. The combiner is an inner function."""
    n = len(e.operands) // 2
    codes = [writer.read(a).code for a in e.operands]
    inner, program = InnerFunction(writer.block, "combine"), combiner(e)
    names = [inner.scope.new(letter) for letter in letters(2 * n)]
    one, unpack_one = inner.packed_parameter("one", names[:n])
    other, unpack_other = inner.packed_parameter("other", names[n:])
    results = inner.block.write(program.body, program_operands(program, list(map(Code, names))))
    inner.finish([one, other], [*unpack_one, *unpack_other], [packed([r.code for r in results])])
    arguments = packed(codes[:n]), packed(codes[n:]), Code(inner.name)
    if e.name == "reduce":
        value = call("lax.reduce", *arguments, tuple(e.params["dimensions"]))
    else:
        p = e.params
        dilations = {k: tuple(p[k]) for k in ("base_dilation", "window_dilation") if set(p[k]) != {1}}
        padding = sequence([literal(tuple(pair)) for pair in p["padding"]])
        windows = tuple(p["window_dimensions"]), tuple(p["window_strides"])
        value = call("lax.reduce_window", *arguments, *windows, padding, **dilations)
    return writer.block.let(["combined"] * n, value)


def is_scatter_apply(e: Equation) -> bool:
    """Return whether a scatter applies a function to elements (`x.at[i].apply(f)`) rather than replace them."""
    if e.name != "scatter" or e.params["update_jaxpr"] is None:
        return False
    program = e.params["update_jaxpr"]
    return program.outvars[0] is not program.invars[1]


def applied_program(e: Equation) -> LocalProgram:
    """Return the program that a scatter applies to an element. It has a second operand, which it does not read."""
    return closed(core.ClosedJaxpr(e.params["update_jaxpr"], e.params["update_consts"]))


def scatter_apply(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a scatter that applies a function to the elements. The function is an inner one."""
    operand, indices, update = e.operands
    inner, program = InnerFunction(writer.block, "apply"), applied_program(e)
    name = inner.scope.new("x")
    results = inner.block.write(program.body, program_operands(program, [Code(name), Code("None")]))
    inner.finish([name], [], [results[0].code])
    arguments = [writer.read(operand).code, writer.read(indices).code, Code(inner.name), scatter_dimensions(e)]
    shape = tuple(writer.body.tensor(update).shape)
    value = call("lax.scatter_apply", *arguments, update_shape=shape, **index_parameters(e))
    return writer.block.let(["applied"], value)


def linear_solve(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a custom linear solve. The product, the solver and the transposed solver are inner functions.

    JAX transposes the product itself.
    """
    programs = e.params["jaxprs"]
    constants, right = split_operands(e, [writer.block.named(writer.read(a), "given") for a in e.operands])
    count, codes = len(right), packed([o.code for o in right])

    def function(name: str, first_parameters: Sequence[str]) -> Code:
        program, inner = closed(getattr(programs, name)), InnerFunction(writer.block, name)
        names = [inner.scope.new("x") for _ in range(count)]
        parameter, unpack = inner.packed_parameter("xs", names)
        operands = _with_constants(program, constants[name], [Code(x) for x in names])
        results = [o.code for o in inner.block.write(program.body, operands)]
        auxiliary = [packed(results[count:])] if results[count:] else []
        inner.finish([*first_parameters, parameter], unpack, [packed(results[:count]), *auxiliary])
        return Code(inner.name)

    product, solve = function("matvec", []), function("solve", ["_"])
    options: dict[str, object] = {}
    if "transpose_solve" in program_names(e):
        options["transpose_solve"] = function("transpose_solve", ["_"])
    options |= {"symmetric": True} if is_symmetric(e) else {}
    aux = len(e.results) - count
    options |= {"has_aux": True} if aux else {}
    value = call("lax.custom_linear_solve", product, codes, solve, **options)
    if not aux:
        return writer.block.let(["solved"] * count, value)
    solved, beside = writer.block.let(["solved", "beside"], value)
    return [*_items(solved, count), *_items(beside, aux)]


def _items(values: Code, count: int) -> list[Code]:
    return [values] if count == 1 else [Code(f"{values}[{k}]") for k in range(count)]


NestedWriter = Callable[[BodyWriter, Equation], list[Code]]
NESTED: Mapping[str, NestedWriter] = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "platform_index": platform_index,
    **dict.fromkeys(REMATERIALIZED, checkpoint),
    **dict.fromkeys(RULED, custom_derivative),
    **dict.fromkeys(("reduce", "reduce_window"), reduction),
    "custom_linear_solve": linear_solve,
    "pure_callback": pure_callback,
    "shard_map": refused,
}


def nested_writer(e: Equation) -> NestedWriter | None:
    """Return the function that writes an equation with nested programs, or None for any other equation."""
    return scatter_apply if is_scatter_apply(e) else NESTED.get(e.name)
