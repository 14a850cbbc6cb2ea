"""The choice of rules of loops: each program on the way is priced, and kept if it is cheaper than all before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body
from unity.search.cost.operator_runs import stacking_seconds
from unity.search.joint.joint import GAIN
from unity.search.joint.pricing import Prices
from unity.substitutions.language.loop_rules import BATCHED, FEWER_ROUNDS, MAPPED, WRITTEN_OUT, LoopRule
from unity.transforms.loops.loop_rewriting import LoopApplication, LoopRewriting, applicable, apply, loop_rewriting

MOST = 16  # programs that are priced, without the captured one
UNROLLING_GAIN = 0.05  # the least gain of fewer rounds, relative to the whole price: XLA takes longer to compile them

Path = tuple[LoopApplication, ...]


def best(
    captured: Captured,
    rules: Sequence[LoopRule],
    prices: Prices,
    seconds: float = 0.0,
    say: Callable[[str], None] = lambda stage: None,
) -> LoopRewriting | None:
    """Return the rules of loops that make a program cheapest, or None if none makes it cheaper.

    All rules of single loops are tried together first, wherever they apply, then that of loops beside each other, too, then each
    rule at the scans with equal steps, then loops written out, and unrolled loops last.

    Args:
        captured: the program.
        rules: the rules that may be applied.
        prices: the prices of programs.
        seconds: those of a plan of the program. Nothing is priced if fewer rounds alone apply and can save a small part of them.
        say: receives a line of progress for every program that is priced.
    """
    path, body, count = (), captured.body, 0
    applying = [rule for rule in rules if applicable(body, rule)]
    if all(rule in FEWER_ROUNDS for rule in applying) and not _may_gain(applying, captured, body, prices, seconds):
        return None
    price = prices.whole(body, captured.differentiated)
    improved = True
    while improved:
        improved, worth = False, [rule for rule in FEWER_ROUNDS if _may_gain([rule], captured, body, prices, price)]
        for more, other in attempts(body, [rule for rule in rules if rule not in FEWER_ROUNDS or rule in worth]):
            gain = UNROLLING_GAIN if any(a.rule == rule.name for a in more for rule in FEWER_ROUNDS) else GAIN
            if count == MOST:
                break
            count += 1
            say(f"rules of loops: {count} programs priced")
            cost = prices.whole(other, captured.differentiated, (1 - gain) * price)
            if cost < (1 - gain) * price:
                path, body, price, improved = (*path, *more), other, cost, True
                break
    return loop_rewriting(captured, path, prices.bodies) if path else None


def seconds_of_rows(captured: Captured, body: Body, prices: Prices) -> float:
    """Return the seconds in which the loops of a program write rows of stacked values: the most that fewer of these can save."""
    graph = prices.graph(body)
    differentiated = captured.differentiated if prices.training.backward else ()
    return stacking_seconds(graph, differentiated, prices.machine.device.launch)


def _may_gain(rules: Sequence[LoopRule], captured: Captured, body: Body, prices: Prices, seconds: float) -> bool:
    """Return whether some rules for fewer rounds may make a program of some seconds cheaper by a gain that is worth it.

    They save the writing of rows; with the steps written out, a carry may have another type in each step, too.
    """
    if WRITTEN_OUT in rules and prices.machine.devices > 1:
        return True
    return bool(rules) and seconds_of_rows(captured, body, prices) >= UNROLLING_GAIN * seconds


def attempts(body: Body, rules: Sequence[LoopRule]) -> Iterator[tuple[Path, Body]]:
    """Yield applications of rules to a program, with the program after them: all until none applies, and each one alone.

    Loops are made one after all else that applies to each, and only if that is still cheaper. Rounds become fewer last.
    """
    tried = set[Path]()
    single = [rule for rule in rules if rule not in (BATCHED, MAPPED, *FEWER_ROUNDS)]
    for some in (single, [rule for rule in rules if rule in (*single, BATCHED)]):
        every, after = everywhere(body, some)
        if every and every not in tried:
            tried.add(every)
            yield every, after
    for application in (a for rule in rules if rule not in FEWER_ROUNDS for a in applicable(body, rule)):
        if (application,) not in tried:
            yield (application,), apply(body, application)
    for rule in (rule for rule in FEWER_ROUNDS if rule in rules):
        every, after = everywhere(body, [rule])
        yield from [(every, after)] if every else []
        loops = [(a,) for a in applicable(body, rule)]
        yield from ((path, apply(body, *path)) for path in loops if path != every)


def everywhere(body: Body, rules: Sequence[LoopRule]) -> tuple[Path, Body]:
    """Apply rules until none applies: what left an inner loop may leave the outer one, too."""
    path = list[LoopApplication]()
    while (application := next((a for rule in rules for a in applicable(body, rule)), None)) is not None:
        body = apply(body, application)
        path.append(application)
    return tuple(path), body
