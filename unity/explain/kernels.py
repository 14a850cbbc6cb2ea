"""The Pallas kernels of a plan, and the ways to divide them that were inferred from their grids."""

from __future__ import annotations

from collections.abc import Iterator

from unity.base.errors import CaptureError
from unity.base.formatting import short
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body, Equation
from unity.pcg.operators.kernel_primitive import KERNEL
from unity.pcg.operators.pallas_kernels import PallasKernel, kernel_of
from unity.pcg.propagation.nested.derivative_rules import Unreadable, is_reverse_only, vjp_bodies
from unity.plan.plan import Plan


def inferred_kernels(plan: Plan) -> list[str]:
    """Return a line for each Pallas kernel without a declaration: how devices may divide it, or why not."""
    nodes = (node for node, _ in plan.program.serial.walk() if node.body is not None)
    lines = (_line(kernel, source or node.source) for node in nodes if node.body for kernel, source in _kernels(node.body))
    return list(dict.fromkeys(lines))


def _kernels(body: Body) -> Iterator[tuple[PallasKernel, str]]:
    """Iterate over the kernels in a body and in the programs and derivative rules nested in it, each with the user's line."""
    for e in body.equations:
        kernel = kernel_of(e.params["function"]) if e.name == KERNEL else None
        if kernel is not None:
            yield kernel, e.source
        for inner in (*bodies(e), *_rules(e)):
            yield from _kernels(inner)


def _rules(e: Equation) -> tuple[Body, ...]:
    """Return the programs of a call's reverse-mode derivative rule, or none if it cannot be traced: no plan needs it then."""
    try:
        if e.origin is None or not is_reverse_only(e):
            return ()
        rule = vjp_bodies(e)
    except (Unreadable, CaptureError):
        return ()
    return rule.forward, rule.backward


def _line(kernel: PallasKernel, source: str) -> str:
    name = f"{kernel.title} ({short(source)}), a Pallas kernel,"
    dims = [f"{w.grid} (a sum)" if f"g{w.grid}" in kernel.dimensions.summed else str(w.grid) for w in kernel.walks]
    if not dims:
        return f"{name} runs whole on every device: {'; '.join(kernel.whole) or 'its grid has a single step'}"
    more = f"; not along {'; '.join(kernel.whole)}" if kernel.whole else ""
    return f"{name} can be divided, as inferred from its index maps, along grid dimension {', '.join(dims)}{more}"
