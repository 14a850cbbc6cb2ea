"""From a jaxpr to operations: calls inlined, primitives said in XLA's instructions as far as memory depends on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.exec.liveness.kinds import ELEMENTWISE
from unity.exec.liveness.program import NOWHERE, Builder, Origin, Program
from unity.exec.lowering import AT
from unity.pcg.capture.capture import tensor_of
from unity.pcg.ir.program import Tensor, tensor_type
from unity.pcg.jaxprs.jaxprs import called
from unity.pcg.propagation.scan_programs import REMATERIALIZED
from unity.search.memory.backend import Backend

ALIKE = frozenset(
    {
        "pvary", "pcast", "unreplicate", "copy", "copy_p", "stop_gradient", "sharding_constraint", "reshard", "mesh_cast", "name",
        "reduce_precision", "layout_constraint", "device_put",
    }
)  # fmt: skip
NAMED = {
    "select_n": "select", "mul": "multiply", "add_any": "add", "rev": "reverse", "dynamic_slice": "dynamic-slice",
    "dynamic_update_slice": "dynamic-update-slice", "reduce_window_max": "reduce-window", "reduce_window_min": "reduce-window",
    "reduce_window_sum": "reduce-window", "cumsum": "reduce-window", "cumprod": "reduce-window", "cummax": "reduce-window",
}  # fmt: skip
ON_REFERENCES = frozenset({"pallas_call"})  # their programs change what is elsewhere, in memory of their own
LABEL = re.compile(rf"[\w\-. +]+{AT}[^()/]*")  # what `lowering.label` gives
WIDE = np.dtype(np.float32)
NEUTRAL = frozenset({"bitcast", "transpose", "convert", "barrier", "while", "constant", "iota"})  # need no arithmetic

Values = list[int]
Rule = Callable[["Lowering", core.JaxprEqn, Values, Origin], Values]


class Lowering(Builder):
    """Operations as a jaxpr is walked."""

    def __init__(self, backend: Backend, rules: Mapping[str, Rule]) -> None:
        """`rules`: how the primitives are said that are no operation of their own."""
        super().__init__()
        self.backend, self.rules = backend, rules
        self.after: int | None = None  # what a branch waits for

    def emit(
        self,
        kind: str,
        operands: Iterable[int],
        tensors: Iterable[Tensor],
        params: tuple[Any, ...] = (),
        origin: Origin = NOWHERE,
        inside: Program | None = None,
    ) -> tuple[int, ...]:
        """An operation, whose operands are as large as its result if it works element by element. Where the backend has none on
        narrow numbers: one on wide ones between conversions (FloatNormalization)."""
        operands, tensors = tuple(operands), tuple(tensors)
        narrow = self.backend.widened
        if kind in NEUTRAL or not any(str(t.dtype) in narrow for t in (*tensors, *(self.tensors[v] for v in operands))):
            return super().emit(kind, self.spread(kind, operands, tensors[0], origin), tensors, params, origin, inside)
        wide = [self.converted(v, WIDE, origin) if str(self.tensors[v].dtype) in narrow else v for v in operands]
        made = [tensor_type(t.shape, WIDE) if str(t.dtype) in narrow else t for t in tensors]
        results = super().emit(kind, self.spread(kind, wide, made[0], origin), made, params, origin, inside)
        return tuple(self.converted(v, t.dtype, origin) for v, t in zip(results, tensors, strict=True))

    def converted(self, v: int, dtype: Any, origin: Origin) -> int:
        """A value as another type."""
        tensor = self.tensors[v]
        return v if tensor.dtype == dtype else self.emit("convert", (v,), (tensor_type(tensor.shape, dtype),), (), origin)[0]

    def constant(self, value: Any) -> int:
        """An array that is part of the program: it takes no memory of the step's."""
        if np.ndim(value) == 0 and not hasattr(value, "unwrap"):
            text = repr(np.asarray(value).item())
            return self.emit("constant", (), (tensor_of(np.asarray(value)),), (text,))[0]
        return self.emit("constant", (), (tensor_of(value),), (id(value),))[0]

    def zeros(self, tensor: Tensor, origin: Origin) -> int:
        """An array of zeros; of keys, which numpy has no zero of, too."""
        dtype = np.uint32 if jnp.issubdtype(tensor.dtype, jax.dtypes.extended) else tensor.dtype
        zero = self.emit("constant", (), (tensor_type((), tensor.dtype),), (repr(np.zeros((), dtype).item()),))[0]
        return self.emit("broadcast", (zero,), (tensor,), (), origin)[0]

    def run(self, jaxpr: core.Jaxpr, arguments: Sequence[int], constants: Sequence[int], origin: Origin) -> Values:
        """The results of a jaxpr on values."""
        env: dict[Any, int] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def read(atom: Any) -> int:
            return self.constant(np.asarray(atom.val, tensor_of(atom.aval).dtype)) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(a) for a in eqn.invars], origin)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: core.JaxprEqn, operands: Values, around: Origin) -> Values:
        """The results of an equation."""
        name, origin = eqn.primitive.name, origin_of(eqn, around)
        if name in ALIKE:
            return operands
        rule = self.rules.get(name)
        if rule is not None:
            return rule(self, eqn, operands, origin)
        inner = called(eqn.params)
        if inner is not None and name not in ON_REFERENCES:
            return self.call(eqn, inner, operands, origin)
        tensors = [tensor_of(v.aval) for v in eqn.outvars]
        params = tuple(sorted((k, str(v)) for k, v in eqn.params.items() if k not in ("sharding", "out_sharding")))
        return list(self.emit(NAMED.get(name, name), operands, tensors, params, origin))

    def call(self, eqn: core.JaxprEqn, inner: Any, operands: Values, origin: Origin) -> Values:
        """A called program, inlined. What is computed again for the backward pass waits behind a barrier."""
        again = eqn.primitive.name in REMATERIALIZED and bool(eqn.params.get("differentiated"))
        if again and eqn.params.get("prevent_cse"):
            operands = list(self.emit("barrier", operands, [self.tensors[v] for v in operands], (), origin))
        jaxpr, consts = opened(inner)
        if eqn.primitive.name == "shard_map":
            for v, var in zip(operands, jaxpr.invars, strict=True):
                self.tensors[v] = tensor_of(var.aval)  # one device's piece of it
        return self.run(jaxpr, operands, [self.constant(x) for x in consts], replace(origin, again=origin.again or again))

    def bitcast(self, v: int, tensor: Tensor, origin: Origin) -> int:
        """The same bytes in another shape."""
        while self.kind(v) == "bitcast":
            v = self.made[v].operands[0]
        return v if self.tensors[v] == tensor else self.emit("bitcast", (v,), (tensor,), (), origin)[0]

    def spread(self, kind: str, operands: Sequence[int], result: Tensor, origin: Origin) -> Sequence[int]:
        """Operands as large as the result of what works element by element: JAX says so only when it writes the program."""
        if kind not in ELEMENTWISE or all(self.tensors[v].shape == result.shape for v in operands):
            return operands
        rank, given = len(result.shape), [self.tensors[v] for v in operands]
        wide = [(tensor_type(result.shape, t.dtype), range(rank - len(t.shape), rank)) for t in given]
        return [self.broadcast(v, *how, origin) for v, how in zip(operands, wide, strict=True)]

    def broadcast(self, v: int, tensor: Tensor, dimensions: Sequence[int], origin: Origin) -> int:
        """A value along more dimensions, or longer ones of size 1; these are dropped first."""
        given = self.tensors[v]
        if given.nbytes == tensor.nbytes:
            return self.bitcast(v, tensor, origin)
        kept = [d for n, d in zip(given.shape, dimensions, strict=True) if n == tensor.shape[d]]
        v = self.bitcast(v, tensor_type(tuple(tensor.shape[d] for d in kept), given.dtype), origin)
        return self.emit("broadcast", (v,), (tensor,), tuple(kept), origin)[0]

    def transpose(self, v: int, order: Sequence[int], origin: Origin, copied: bool = False) -> int:
        """The dimensions in another order, which moves nothing if only dimensions of size 1 change places. `copied`: unless who
        reads it has it copied nevertheless."""
        tensor = self.tensors[v]
        if self.kind(v) == "transpose":
            inner = self.made[v]
            return self.transpose(inner.operands[0], [inner.params[k] for k in order], origin, copied)
        result = tensor_type(tuple(tensor.shape[k] for k in order), tensor.dtype)
        moved = [k for k in order if tensor.shape[k] > 1 or copied]
        if moved == sorted(moved):
            return self.bitcast(v, result, origin)
        return self.emit("transpose", (v,), (result,), tuple(order), origin)[0]

    def kind(self, v: int) -> str:
        return self.made[v].kind if v in self.made else "input"

    def scalar(self, v: int) -> str | None:
        """What a constant, or its broadcast, says."""
        op = self.made.get(v)
        while op is not None and op.kind in ("broadcast", "bitcast", "convert"):
            op = self.made.get(op.operands[0])
        return op.params[0] if op is not None and op.kind == "constant" and isinstance(op.params[0], str) else None


def opened(program: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """A program, closed or not, and its constants."""
    return (program.jaxpr, program.consts) if isinstance(program, core.ClosedJaxpr) else (program, ())


def origin_of(eqn: core.JaxprEqn, around: Origin) -> Origin:
    """The origin of an equation, from the names around it: JAX says what is transposed and computed again."""
    stack = str(eqn.source_info.name_stack)
    labels = LABEL.findall(stack)
    return Origin(
        labels[-1] if labels else around.label,
        around.backward or "transpose(" in stack,
        around.again or "rematted_computation" in stack,
    )


def tensors_of(eqn: core.JaxprEqn) -> list[Tensor]:
    """The types of an equation's results."""
    return [tensor_of(v.aval) for v in eqn.outvars]
