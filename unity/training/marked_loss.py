"""`unity.loss`, the mark of a function that a training step differentiates, and the two traces of a step with it.

The first trace surveys the marked calls: their programs, and which arrays are differentiated. In the second, plans compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import count
from typing import Any, Protocol, TypeVar

import jax
import jax.core
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.sharding import NamedSharding

from unity.base.errors import PlanError
from unity.exec.context import refuse_manual
from unity.exec.hosts.arrays import place
from unity.pcg.capture.observations import observed_program
from unity.pcg.ir.dead_code import used
from unity.pcg.jaxprs.weak_types import struct_of
from unity.plan.plan import Plan
from unity.planning.options import refuse_uncallable
from unity.training.array_call import ArrayCall

F = TypeVar("F", bound=Callable[..., Any])
OPERAND, GRADIENT = "unity: an operand of a loss", "unity: a gradient"  # names of values in a trace


class Trace(Protocol):
    """A trace of a training step."""

    def call(self, marked: MarkedCall, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a marked call."""
        ...


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
_numbers = count(1)


def loss(fn: F) -> F:
    """Mark a function whose gradient a training step takes, so that `unity.step` plans it.

    Outside of such a step the result behaves like the function itself. A marked function that another one calls is a part of it.

    Args:
        fn: the function. It may close over arrays of the step, and return auxiliary values beside the loss.

    Raises:
        OptionError: `fn` cannot be called.
    """
    refuse_uncallable(fn, "that a step differentiates")

    @wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        trace = _trace.get()
        if trace is None:
            return fn(*args, **kwargs)
        refuse_manual()  # before JAX differentiates with respect to values that vary along manual axes
        call = ArrayCall(fn, args, kwargs)
        with _tracing(None):
            marked_call, operands = _traced(call, getattr(fn, "__name__", "loss"))
        return call.finish(trace.call(marked_call, operands), call.form)

    return marked  # pyright: ignore[reportReturnType]


@contextmanager
def _tracing(trace: Trace | None) -> Iterator[None]:
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


@contextmanager
def traced_with(trace: Trace) -> Iterator[None]:
    """Provide a context in which marked functions are calls of a trace.

    JAX caches the programs of functions that it has traced, such as a scan's body, and would not call marked functions in them
    again. The metadata separate the programs of this context from all others.
    """
    with _tracing(trace), set_xla_metadata(unity_trace=str(next(_numbers))):
        yield


@dataclass(frozen=True)
class MarkedCall:
    """A call of a marked function in a training step.

    Attributes:
        name: the name of the function.
        program: its program. The operands are the arrays among its arguments, and those of the step that it closes over.
        trees: the numbers of the operands, as a tree like each argument; the last tree has those that the function closes over.
        constant: whether each operand is a constant of the step, such as a frozen weight that the function closes over.
        perturbed: whether each operand is differentiated, which is known at the end of the trace.
    """

    name: str
    program: core.ClosedJaxpr
    trees: tuple[Any, ...]
    constant: tuple[bool, ...]
    perturbed: list[bool]

    def run(self, *operands: Any) -> tuple[Any, ...]:
        """Compute the results of the function."""
        return tuple(core.jaxpr_as_fun(self.program)(*operands))

    @cached_property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the operands."""
        return tuple(map(struct_of, self.program.in_avals))

    @cached_property
    def key(self) -> Hashable:
        """The content of the program and of its differentiation. A plan serves all calls with one key."""
        body = used(observed_program(self.program).body)
        constants = tuple(map(id, self.program.consts))
        structures = tuple(map(jax.tree.structure, self.trees))
        return body.key, body.identity, constants, structures, tuple(self.perturbed), self.structs

    @cached_property
    def arguments(self) -> PlanArguments:
        """The operands as arguments of a plan."""
        return PlanArguments.of(self.trees, self.perturbed)

    @property
    def planned_function(self) -> Callable[..., tuple[Any, ...]]:
        """The function that is planned, of `arguments`."""

        def planned(*arguments: Any) -> tuple[Any, ...]:
            return self.run(*self.arguments.operands(arguments))

        planned.__name__ = self.name
        return planned


def _traced(call: ArrayCall, name: str) -> tuple[MarkedCall, tuple[Any, ...]]:
    """Trace a marked call. Return it with its operands."""
    arrays = call.inputs.arrays
    closed = jax.make_jaxpr(call)(*arrays)
    outer = [k for k, x in enumerate(closed.consts) if isinstance(x, jax.core.Tracer)]
    operands = (*arrays, *(closed.consts[k] for k in outer))

    def program(*values: Any) -> list[Any]:
        consts = list(closed.consts)
        for k, x in zip(outer, values[len(arrays) :], strict=True):
            consts[k] = x
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(*values[: len(arrays)])

    trees = (*call.argument_trees, tuple(range(len(arrays), len(operands))))
    constant = tuple(not isinstance(x, jax.core.Tracer) for x in operands)
    return MarkedCall(name, jax.make_jaxpr(program)(*operands), trees, constant, [False] * len(operands)), operands


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of a plan. If only a part of a function's argument is differentiated, the rest is a further argument.

    Attributes:
        trees: the numbers of the operands, as a tree like each argument.
        differentiated: the numbers of the arguments that are differentiated.
    """

    trees: tuple[Any, ...]
    differentiated: tuple[int, ...]

    @classmethod
    def of(cls, trees: Sequence[Any], perturbed: Sequence[bool]) -> PlanArguments:
        """Divide trees of operands' numbers by whether each operand is differentiated."""
        parts, rests, differentiated = [], [], []
        for k, tree in enumerate(trees):
            flags = {perturbed[i] for i in jax.tree.leaves(tree)}
            mixed = len(flags) == 2
            parts.append(_with(tree, perturbed, True) if mixed else tree)
            rests += [_with(tree, perturbed, False)] if mixed else []
            differentiated += [k] if True in flags else []
        return cls((*parts, *rests), tuple(differentiated))

    def fill(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with these operands."""
        return tuple(jax.tree.map(lambda k: operands[k], tree) for tree in self.trees)

    def operands(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the operands of these arguments: the inverse of `fill`."""
        numbers, values = jax.tree.leaves(self.trees), jax.tree.leaves(tuple(arguments))
        return [x for _, x in sorted(zip(numbers, values, strict=True), key=lambda pair: pair[0])]


def _with(tree: Any, perturbed: Sequence[bool], flag: bool) -> Any:
    """Return a tree of operands' numbers, with None for those that do not have the flag."""
    return jax.tree.map(lambda k: k if perturbed[k] == flag else None, tree)


@dataclass(frozen=True)
class Survey:
    """The trace that collects the marked calls of a step. They compute what they would without a mark."""

    calls: list[MarkedCall] = field(default_factory=list)

    def call(self, marked: MarkedCall, operands: Sequence[Any]) -> Sequence[Any]:
        """Record a call, and compute it."""
        self.calls.append(marked)
        return marked.run(*_watched(operands, marked.perturbed))


def _watched(arrays: Sequence[Any], perturbed: list[bool]) -> Sequence[Any]:
    """Return arrays unchanged, and record in `perturbed` which are differentiated, even after a scan around them is traced."""

    @jax.custom_jvp
    def watch(*values: Any) -> tuple[Any, ...]:
        return values

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        for k, tangent in enumerate(tangents):
            perturbed[k] |= not isinstance(tangent, SymbolicZero)
        return primals, tangents

    watch.defjvp(rule, symbolic_zeros=True)
    return watch(*arrays)


@dataclass(frozen=True)
class PlannedTrace:
    """The trace in which plans compute the marked calls.

    Attributes:
        name: the name of the step.
        surveyed: the calls of the survey, in their order.
        plans: the plan for each.
        named: whether the operands and their gradients have names in the trace: those of `operand_name`, and `GRADIENT`.
    """

    name: str
    surveyed: Sequence[MarkedCall]
    plans: Sequence[Plan]
    named: bool = False
    done: list[MarkedCall] = field(default_factory=list)

    def call(self, marked: MarkedCall, operands: Sequence[Any]) -> Sequence[Any]:
        """Compute a call by its plan."""
        k = len(self.done)
        self.done.append(marked)
        if k >= len(self.surveyed) or self.surveyed[k].structs != marked.structs:
            self.refuse()
        if self.named:
            flags = enumerate(zip(operands, self.surveyed[k].perturbed, strict=True))
            operands = [_named(x, operand_name(k, i), perturbed) for i, (x, perturbed) in flags]
        plan, arguments = self.plans[k], self.surveyed[k].arguments.fill(operands)
        return plan(*jax.tree.map(_placed, arguments, plan.in_shardings))

    def refuse(self) -> None:
        """Raise PlanError, because the second trace differs from the first."""
        raise PlanError(
            f"{self.name} differentiates other functions when it is traced again: it must do the same in every trace, as for"
            " jax.jit. (docs: training#errors)"
        )


def operand_name(call: int, operand: int) -> str:
    """Return the name of an operand of a marked call in the trace, which begins with `OPERAND`."""
    return f"{OPERAND}, number {operand} of call {call}"


def _named(x: Any, name: str, perturbed: bool) -> Any:
    """Return an operand with its name in the trace, and with that of its gradient. A constant of the step has no name."""
    if not isinstance(x, jax.core.Tracer):
        return x
    return checkpoint_name(_with_named_gradient(x) if perturbed else x, name)


@jax.custom_vjp
def _with_named_gradient(x: Any) -> Any:
    """Return a value whose cotangent has the name `GRADIENT`."""
    return x


_with_named_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (checkpoint_name(cotangent, GRADIENT),))


def _placed(x: Any, sharding: NamedSharding) -> Any:
    """Return an operand of a plan. A constant of the step is placed where the plan needs it."""
    if isinstance(x, jax.core.Tracer):
        return x
    with jax.ensure_compile_time_eval():
        return place(x, sharding)
