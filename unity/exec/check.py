"""What the compiled program really does, against what the plan says: collectives by kind, bytes, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.exec.hlo import Memory, collectives, memory
from unity.pcg.gradients import losses
from unity.pcg.graph import PCG
from unity.pcg.traffic import FORWARD, traffic

if TYPE_CHECKING:
    from unity.plan import Plan


@dataclass(frozen=True)
class Line:
    """One kind of collective: elements on one device in one step, predicted and compiled."""

    kind: str
    predicted: int
    compiled: int

    @property
    def difference(self) -> float:
        """(compiled - predicted) / the larger of both."""
        return (self.compiled - self.predicted) / max(self.compiled, self.predicted, 1)


@dataclass(frozen=True)
class Check:
    """A plan against its compiled program. Elements, because CPU backends widen bfloat16 collectives."""

    lines: tuple[Line, ...]
    memory: Memory
    predicted_memory: float

    @property
    def total(self) -> Line:
        """All kinds together."""
        return Line("all", sum(line.predicted for line in self.lines), sum(line.compiled for line in self.lines))

    def agrees(self, tolerance: float = 0.02) -> bool:
        """Whether every kind, and the total, agree within `tolerance` of the total."""
        room = tolerance * max(self.total.compiled, self.total.predicted, 1)
        return all(abs(line.compiled - line.predicted) <= room for line in (*self.lines, self.total))

    def __str__(self) -> str:
        rows = [f"{'collective':20} {'predicted':>14} {'compiled':>14}  (elements on one device)"]
        lines = (*self.lines, self.total)
        rows += [f"{line.kind:20} {line.predicted:14,} {line.compiled:14,}  {line.difference:+.1%}" for line in lines]
        rows.append(f"{'memory':20} {self.predicted_memory:14,.0f} {self.memory.total:14,}  (bytes)")
        return "\n".join(rows)


def predicted_elements(
    graph: PCG, differentiated: Any, direction: str | None = None, merged: bool = False
) -> Mapping[str, int]:
    """Elements of every kind of collective in one step, on one device; equal ones of one value count once, as XLA runs them.

    `merged`: as a backend that drops `jax.checkpoint`'s barriers in straight-line code runs them, a repeated collective being
    the first one again (design section 9).
    """
    found: Counter[str] = Counter()
    seen: set[Hashable] = set()
    for c in traffic(graph, differentiated):
        if direction in (None, c.direction):
            once = 0 if c.name in seen else c.count - c.repeats
            found[c.kind] += c.elements * (once + (0 if merged else c.repeats))
            seen |= {c.name} - {None}
    return found


def compile_step(plan: Plan, gradient: bool) -> Any:
    """The compiled program of one step: the function, and with `gradient` its weights' gradients. Nothing is allocated."""
    captured = plan._made.captured
    shardings = plan._shardings
    leaves = [
        jax.ShapeDtypeStruct(n.tensors[0].shape, n.tensors[0].dtype, sharding=s)
        for n, s in zip(plan.original.inputs, shardings, strict=True)
    ]
    run = plan._program
    if not gradient:
        return jax.jit(run).lower(*leaves).compile(compiler_options=_options())
    weights = sorted(k for k in captured.differentiated if plan.original.inputs[k].tensors[0].floating)
    ends = losses(plan.original)

    def step(chosen: list, others: list) -> Any:
        def scalar(chosen: list) -> Any:
            given = iter(others)
            full = [chosen[weights.index(k)] if k in weights else next(given) for k in range(len(leaves))]
            out = run(*full)
            return sum(jnp.sum(jnp.real(out[k])) for k in ends), out

        return jax.grad(scalar, has_aux=True)(chosen)

    chosen, others = [leaves[k] for k in weights], [x for k, x in enumerate(leaves) if k not in weights]
    return jax.jit(step).lower(chosen, others).compile(compiler_options=_options())


def _options() -> dict[str, str]:
    """On CPU, the all-reduce combiner keeps all gradients alive at once; bytes are the same without it (design section 9)."""
    return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"} if _on_cpu() else {}


def _on_cpu() -> bool:
    return jax.devices()[0].platform == "cpu"


def compare(plan: Plan, gradient: bool) -> Check:
    """Compiles one step of a plan and compares."""
    compiled = compile_step(plan, gradient)
    found: Counter[str] = Counter()
    for c in collectives(compiled.as_text()):
        found[c.kind] += c.elements * c.count
    captured = plan._made.captured
    differentiated = captured.differentiated if gradient else ()
    predicted = predicted_elements(plan.pcg, differentiated, None if gradient else FORWARD, _on_cpu())
    kinds = sorted({*found, *predicted})
    lines = tuple(Line(k, int(predicted.get(k, 0)), int(found.get(k, 0))) for k in kinds)
    return Check(lines, memory(compiled), float(np.round(plan.memory)))
