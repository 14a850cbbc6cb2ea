"""The choice of rules of loops: each program on the way is priced, and kept if it is cheaper than all before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body
from unity.search.joint.joint import GAIN
from unity.search.joint.pricing import Prices
from unity.substitutions.language.loop_rules import BATCHED, LoopRule
from unity.transforms.loops.loop_rewriting import LoopApplication, LoopRewriting, applicable, apply, loop_rewriting

MOST = 16  # programs that are priced, without the captured one

Path = tuple[LoopApplication, ...]


def best(
    captured: Captured, rules: Sequence[LoopRule], prices: Prices, say: Callable[[str], None] = lambda stage: None
) -> LoopRewriting | None:
    """Return the rules of loops that make a program cheapest, or None if none makes it cheaper.

    All rules but that of loops beside each other are tried together first, wherever they apply, then this one, too, then each rule
    at the scans with equal steps.

    Args:
        captured: the program.
        rules: the rules that may be applied.
        prices: the prices of programs.
        say: receives a line of progress for every program that is priced.
    """
    path, body, count = (), captured.body, 0
    if not any(applicable(body, rule) for rule in rules):
        return None
    price = prices.whole(body, captured.differentiated)
    improved = True
    while improved:
        improved = False
        for more, other in attempts(body, rules):
            if count == MOST:
                break
            count += 1
            say(f"rules of loops: {count} programs priced")
            cost = prices.whole(other, captured.differentiated, (1 - GAIN) * price)
            if cost < (1 - GAIN) * price:
                path, body, price, improved = (*path, *more), other, cost, True
                break
    return loop_rewriting(captured, path, prices.bodies) if path else None


def attempts(body: Body, rules: Sequence[LoopRule]) -> Iterator[tuple[Path, Body]]:
    """Yield applications of rules to a program, with the program after them: all until none applies, and each one alone.

    Loops are made one after all else that applies to each, and only if that is still cheaper.
    """
    tried = set[Path]()
    for some in ([rule for rule in rules if rule is not BATCHED], rules):
        every, together = everywhere(body, some)
        if every and every not in tried:
            tried.add(every)
            yield every, together
    for application in (a for rule in rules for a in applicable(body, rule)):
        if (application,) not in tried:
            yield (application,), apply(body, application)


def everywhere(body: Body, rules: Sequence[LoopRule]) -> tuple[Path, Body]:
    """Apply rules until none applies: what left an inner loop may leave the outer one, too."""
    path = list[LoopApplication]()
    while (application := next((a for rule in rules for a in applicable(body, rule)), None)) is not None:
        body = apply(body, application)
        path.append(application)
    return tuple(path), body
