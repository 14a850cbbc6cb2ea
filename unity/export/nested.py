"""Programs inside of a local program as source: loops and branches as functions inside, the others as functions of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jax.extend import core

from unity.export.applied import Operand
from unity.export.callbacks import callback
from unity.export.errors import ExportError
from unity.export.given import application, applies, linear_solve, reduction
from unity.export.inner import LETTERS, Inner, inputs_of, packed, stem, targets, unpacked_in
from unity.export.policies import policy_code
from unity.export.rules import JVP, VJP, rule_of
from unity.export.source import WIDTH, Code, call, lines, sequence, unpacked
from unity.export.tracing import Program, closed, varying_of
from unity.pcg.ir.program import Equation
from unity.pcg.jaxprs.scan_operands import constants_and_carry
from unity.pcg.propagation.solver import nested_body

if TYPE_CHECKING:
    from unity.export.block import Block, Writing


def inside_of(e: Equation) -> Program:
    """The program of an equation that has one."""
    body = nested_body(e)
    jaxpr = next(p for p in (getattr(p, "jaxpr", p) for p in e.params.values()) if isinstance(p, core.Jaxpr))
    return Program(body, varying_of(jaxpr.invars))


def scan(writing: Writing, e: Equation) -> list[Code]:
    """A scan: its step as a function inside, which reads the constants from around it."""
    program = inside_of(e)
    steps = inputs_of(program, [Code("")] * len(program.varying))
    operands = [writing.read(a) for a in e.operands]
    loop = Loop(constants_and_carry(e.params), e.params["length"], e.params["reverse"], e.params["unroll"])
    return loop.write(writing.block, operands, steps, lambda block, given: [o.code for o in block.write(program.body, given)])


@dataclass(frozen=True)
class Loop:
    """A scan: how many of its operands are constants and how many are carried, and how it runs."""

    parts: tuple[int, int]
    length: int
    reverse: bool = False
    unroll: int | bool = 1

    def write(
        self,
        block: Block,
        operands: Sequence[Operand],
        steps: Sequence[Operand],
        inside: Callable[[Block, list[Operand]], list[Code]],
    ) -> list[Code]:
        """Writes it into a block. `steps`: its operands as one step sees them; `inside` writes one step."""
        c, k = self.parts
        operands = [block.named(o, stem(o.code)) for o in operands]
        inner = Inner(block, "step")
        carry = [inner.scope.new("carried") for _ in range(k)]
        rows = [inner.scope.new(stem(o.code)) for o in operands[c + k :]]
        first, unpack = unpacked_in(inner, "carry", carry)
        second, more = unpacked_in(inner, "rows", rows)
        own = [replace(s, code=Code(name)) for s, name in zip(steps[c:], (*carry, *rows), strict=True)]
        results = inside(inner.block, [*operands[:c], *own])
        inner.finish([first, second], [*unpack, *more], [packed(results[:k]), packed(results[k:])])
        how: dict[str, object] = {"reverse": True} if self.reverse else {}
        how |= {} if self.unroll is False or (self.unroll == 1 and self.unroll is not True) else {"unroll": self.unroll}
        codes = [o.code for o in operands]
        given = [Code(inner.name), packed(codes[c : c + k]), packed(codes[c + k :])]
        found = [block.scope.new("carried" if i < k else "rows") for i in range(len(results))]
        loop, ends = call("lax.scan", *given, length=self.length, **how), f"{targets(found[:k])}, {targets(found[k:])} = "
        if len(ends) <= WIDTH // 2:
            block.lines += lines(loop, block.indent, ends)
            return [Code(name) for name in found]
        for whole, names in zip(block.let(["last", "rows"], loop), (found[:k], found[k:]), strict=True):
            block.lines += [] if not names else unpacked(names, whole.text, block.indent)
            if len(names) == 1:  # packed as itself
                block.lines[-1] = f"{' ' * block.indent}{names[0]} = {whole}"
        return [Code(name) for name in found]


def while_loop(writing: Writing, e: Equation) -> list[Code]:
    """A while loop: its test and its step as functions inside."""
    a, b = e.params["cond_nconsts"], e.params["body_nconsts"]
    operands = [writing.block.named(writing.read(x), "given") for x in e.operands]
    n, names = len(operands) - a - b, []
    for key, consts, wanted in (("cond_jaxpr", operands[:a], "more"), ("body_jaxpr", operands[a : a + b], "step")):
        program = closed(e.params[key])
        inner = Inner(writing.block, wanted)
        carry = [inner.scope.new("carried") for _ in range(n)]
        first, unpack = unpacked_in(inner, "carry", carry)
        given = inputs_of(program, [*(o.code for o in consts), *map(Code, carry)])
        given[: len(consts)] = [Operand(o.code, o.tensor, o.varying, o.constant) for o in consts]
        results = [o.code for o in inner.block.write(program.body, given)]
        inner.finish([first], unpack, [packed(results)])
        names.append(Code(inner.name))
    start = packed([o.code for o in operands[a + b :]])
    wanted = ["looped" if writing.uses[v] else "_" for v in e.results]
    return writing.block.let(wanted, call("lax.while_loop", *names, start))


def cond(writing: Writing, e: Equation) -> list[Code]:
    """A choice: its branches as functions inside, of the same operands."""
    chosen = e.operands[0]
    codes = [writing.read(a).code for a in e.operands[1:]]
    found = []
    for k, program in enumerate(map(closed, e.params["branches"])):
        inner = Inner(writing.block, f"branch_{k}")
        parameters = [inner.scope.new(LETTERS[i % len(LETTERS)]) for i in range(len(codes))]
        results = inner.block.write(program.body, inputs_of(program, [Code(p) for p in parameters]))
        inner.finish(parameters, [], [packed([o.code for o in results])])
        found.append(Code(inner.name))
    truth, platforms = writing.truth(chosen), writing.platforms(chosen)
    if platforms is not None:
        each = {name: code for names, code in zip(platforms, found, strict=True) for name in names or ("default",)}
        value = call("lax.platform_dependent", *codes, **each)
    elif truth is not None and len(found) == 2:
        value = call("lax.cond", writing.read(truth).code, found[1], found[0], *codes)
    else:
        value = call("lax.switch", writing.read(chosen).code, sequence(found, "[]"), *codes)
    return writing.block.let(["either"] * len(e.results), value)


def checkpoint(writing: Writing, e: Equation) -> list[Code]:
    """A `jax.checkpoint`: a function of its own."""
    operands = [writing.read(a) for a in e.operands]
    policy = policy_code(e)
    how = {} if e.params["prevent_cse"] else {"prevent_cse": False}
    how |= {} if policy is None else {"policy": policy}
    decorator = call("partial", Code("jax.checkpoint"), **how) if how else Code("jax.checkpoint")
    name = writing.block.module.function(f"{writing.block.module.operator}_again", inside_of(e), [decorator])
    return writing.block.let(["result"] * len(e.results), call(name, *(o.code for o in operands)))


def custom(writing: Writing, e: Equation) -> list[Code]:
    """A call with a derivative of its own."""
    name = writing.block.module.custom(rule_of(e))
    value = call(name, *(writing.read(a).code for a in e.operands))
    if len(e.results) == 1 and writing.inline(e.results[0], e, value):
        return [value]
    return writing.block.let(["result"] * len(e.results), value)


def platform(writing: Writing, e: Equation) -> list[Code]:
    """Which platform it is: nothing is written, as the choice itself says it."""
    return [Code("platform")]


def refused(writing: Writing, e: Equation) -> list[Code]:
    """A program that no public function is known to make."""
    raise ExportError(e.source, e.name, "programs inside of it are not written yet")


NESTED: Mapping[str, Callable[[Writing, Equation], list[Code]]] = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "platform_index": platform,
    **dict.fromkeys(("checkpoint", "remat", "remat2"), checkpoint),
    **dict.fromkeys((*JVP, *VJP), custom),
    **dict.fromkeys(("reduce", "reduce_window"), reduction),
    "custom_linear_solve": linear_solve,
    "pure_callback": callback,
    "shard_map": refused,
}


def nested_writer(e: Equation) -> Callable[[Writing, Equation], list[Code]] | None:
    """How an equation with a program of its own is written; None of others."""
    return application if applies(e) else NESTED.get(e.name)


LOOPS = frozenset({"scan", "while", "cond"})
