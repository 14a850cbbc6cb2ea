"""One program of the fuzzer: its plans compiled and run, and what was wrong with them."""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import unity
from benchmarks.fuzz.data import drawn
from benchmarks.fuzz.lives import lives, simplified
from benchmarks.fuzz.minimize import minimized
from benchmarks.fuzz.plans import Trial, captured_of, machine_of, random_trials
from benchmarks.fuzz.programs import Program, draw_program
from benchmarks.fuzz.sources import TRANSFORMED, source_of, sources
from benchmarks.fuzz.verdict import QUICK, Reference
from unity.base.errors import UnityError

TOGETHER = 24  # plans in one compiled program
BY_RULES = ("rewritten", "loops", "padding", "chain")  # kinds of plans that rules of algebra lead to
AGAIN = 6  # random transformations that a minimized program must have a wrong plan of one of
SAMPLE, OF_TRANSFORMED = 0.06, 0.2  # of lists of plans, one of which is saved, exported and so on; of transformed programs
# XLA's message about some products of bfloat16, such as attention's, which only the kernels compute that `run.FLAGS` leaves out.
NO_KERNEL = "Dot with multiple contracting dimensions is not implemented"


@dataclass
class Finding:
    """A plan that is wrong, or a crash on the way to one."""

    fault: str  # "wrong", "crash", "refused"
    kind: str  # of plan
    machine: str
    words: str
    where: str = ""  # the innermost line of unity, of a crash
    number: int = -1  # of the plan among those of its machine


@dataclass
class Outcome:
    """What came of one program."""

    seed: int
    kinds: tuple[str, ...] = ()
    primitives: list[str] = field(default_factory=list)
    depth: int = 0
    dtype: str = ""
    order: int = 0
    plans: Counter[str] = field(default_factory=Counter)  # by kind
    devices: Counter[str] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)  # plans with differences of a known kind, and no other, by kind of plan
    findings: list[Finding] = field(default_factory=list)
    source: str = ""
    skipped: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"findings": [vars(f) for f in self.findings]}


def examine(
    seed: int, say: Callable[[str], None] = lambda at: None, only: Collection[str] = (), kinds: Sequence[str] = ()
) -> Outcome:
    """Draws a program and some of its plans, and compares.

    Args:
        seed: the program's seed.
        say: receives where the examination is.
        only: operations, of which the program must have one.
        kinds: kinds of plans, for which the program is drawn, and of which alone it has plans.
    """
    started = time.process_time()
    outcome = Outcome(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        say("drawing")
        drawing = draw_program(seed, kinds=kinds)
        outcome.kinds, outcome.depth, outcome.source = drawing.kinds, drawing.depth, drawing.source
        if only and not set(only) & set(drawing.kinds):
            outcome.skipped = "without these operations"
        else:
            with jax.enable_x64(drawing.x64):
                _examine(drawing, outcome, say, kinds)
    outcome.seconds = time.process_time() - started
    return outcome


def reference_of(drawing: Program, order: int = 1) -> Reference:
    args = drawn(drawing)
    weights = drawing.differentiated if drawing.weights else ()
    reference = Reference(drawing.function, args, [a.name for a in drawing.arguments], drawing.seed, order, weights)
    reference.settle()
    return reference


def _examine(drawing: Program, outcome: Outcome, say: Callable[[str], None], kinds: Sequence[str]) -> None:
    rng = random.Random(drawing.seed + 1)
    order = 2 if rng.random() < 0.06 else 1
    say("the function itself")
    try:
        reference = reference_of(drawing, order)
        _ = reference.whole
    except Exception as error:  # JAX or XLA cannot run the function
        outcome.skipped = f"{type(error).__name__}: {str(error)[:200]}"
        return
    outcome.order = reference.order
    outcome.dtype = str(reference.kinds[0])
    for trials in batches(drawing, reference, outcome, rng, say, kinds):
        for start in range(0, len(trials), TOGETHER):
            judge(trials[start : start + TOGETHER], start, reference, outcome, say)
        if trials and rng.random() < (OF_TRANSFORMED if trials[0].kind in TRANSFORMED else SAMPLE):
            live(rng.choice(trials), reference, outcome, say)


def live(one: Trial, reference: Reference, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Puts one plan to its other uses, and notes what is wrong then."""
    for name, use in lives(one, reference):
        say(f"{name} plan on {one.machine.name}")
        with guarded(outcome, name, one.machine.name):
            wrong = use()
            outcome.lives[name] += 1
            if wrong:
                outcome.findings.append(Finding("check" if name == "check" else "wrong", name, one.machine.name, wrong, one.kind))


def batches(
    drawing: Program,
    reference: Reference,
    outcome: Outcome,
    rng: random.Random,
    say: Callable[[str], None],
    kinds: Sequence[str],
) -> Iterator[list[Trial]]:
    """Lists of plans, each for one machine."""
    captured = None
    with guarded(outcome, "capture", ""):
        say("capture")
        captured = captured_of(drawing.function, reference.args, drawing.differentiated)
        outcome.primitives = sorted({e.name for e in captured.body.equations})
    if captured is None:
        return
    for kind, source in sources(rng, drawing, reference.args, captured, kinds):
        machine = machine_of(rng)
        trials: list[Trial] = []
        with guarded(outcome, kind, machine.name):
            say(f"{kind} plans for {machine.name}")
            for one in source(machine):
                trials.append(one)
        yield trials


class guarded:
    """Notes what is raised: refusals of unity are counted, all else are findings. False in a condition if anything was."""

    def __init__(self, outcome: Outcome, kind: str, machine: str) -> None:
        self.outcome, self.kind, self.machine, self.good = outcome, kind, machine, True

    def __bool__(self) -> bool:
        return self.good

    def __enter__(self) -> guarded:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is None:
            return True
        if not isinstance(error, Exception):
            return False
        self.good = False
        if isinstance(error, UnityError) or NO_KERNEL in str(error):
            self.outcome.refused[f"{self.kind}: {type(error).__name__}: {str(error)[:300]}"] += 1
        else:
            self.outcome.findings.append(crash(error, self.kind, self.machine))
        return True


def crash(error: BaseException, kind: str, machine: str, number: int = -1) -> Finding:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/unity/" in f.filename]
    where = " < ".join(f"{f.filename.rpartition('/unity/')[2]}:{f.lineno} {f.name}" for f in reversed(frames[-3:]))
    return Finding("crash", kind, machine, f"{type(error).__name__}: {str(error)[:600]}", where, number)


def judge(trials: Sequence[Trial], start: int, reference: Reference, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Compile plans together, run them, and compare each. Where that raises, judge each half alone."""
    if not trials:
        return
    say(f"{len(trials)} {trials[0].kind} plans from number {start} on {trials[0].machine.name}")
    try:
        results = run(trials, reference)
    except Exception as error:
        if len(trials) > 1:
            half = len(trials) // 2
            judge(trials[:half], start, reference, outcome, say)
            judge(trials[half:], start + half, reference, outcome, say)
            return
        if isinstance(error, UnityError) or NO_KERNEL in str(error):
            outcome.refused[f"run: {type(error).__name__}: {str(error)[:300]}"] += 1
        else:
            outcome.findings.append(crash(error, trials[0].kind, trials[0].machine.name, start))
        return
    for k, (one, arrays) in enumerate(zip(trials, results, strict=True)):
        outcome.plans[one.kind] += 1
        outcome.devices[one.machine.name] += 1
        found = reference.differences(arrays)
        wrong = [d for d in found if not (d.known or (d.of_nan and one.kind in BY_RULES))]
        if wrong:
            with guarded(outcome, "eager", one.machine.name):
                wrong = [] if simplified(one, reference, arrays) else wrong
        if found and not wrong:
            outcome.known[one.kind] += 1
        if wrong:
            words = "; ".join(map(str, wrong))
            outcome.findings.append(Finding("wrong", one.kind, one.machine.name, words, one.note, start + k))


def run(trials: Sequence[Trial], reference: Reference) -> list[list[Any]]:
    """The steps of plans for one machine, those on each mesh in one program.

    All share arguments, which lie on every device: between other placements XLA's partitioner would have to move them, and it ends
    the process on some ways to do that.
    """
    meshes = [one.plan.inspect.mesh for one in trials]
    results: dict[int, list[Any]] = {}
    for mesh in dict.fromkeys(meshes):
        own = [k for k, other in enumerate(meshes) if other == mesh]
        results |= zip(own, run_on(mesh, [trials[k] for k in own], reference), strict=True)
    return [results[k] for k in range(len(trials))]


def run_on(mesh: Mesh, trials: Sequence[Trial], reference: Reference) -> list[list[Any]]:
    """The steps of plans on one mesh."""
    steps = [reference.step(one.plan) for one in trials]
    together = lambda args, cotangents: [step(args, cotangents) for step in steps]  # noqa: E731
    everywhere = NamedSharding(mesh, PartitionSpec())
    lowered: Any = jax.jit(together, in_shardings=everywhere).lower(reference.args, reference.cotangents)
    return jax.block_until_ready(lowered.compile(compiler_options=QUICK)(reference.args, reference.cotangents))


def wrong_plans(fn: Callable[..., Any], args: Sequence[Any], machine: unity.Machine, count: int = 24, seed: int = 0) -> list[str]:
    """What is wrong with random plans of a function, in words."""
    reference = Reference(fn, list(args), [f"argument {k}" for k in range(len(args))], seed)
    reference.settle()
    outcome = Outcome(seed)
    with guarded(outcome, "random", machine.name):
        captured = captured_of(fn, args)
        trials = list(random_trials(random.Random(seed), fn, captured, machine, count))
        for start in range(0, len(trials), TOGETHER):
            judge(trials[start : start + TOGETHER], start, reference, outcome, lambda at: None)
    return [f"{f.fault}: {f.words} {f.where}" for f in outcome.findings]


def smallest(drawing: Program, finding: Finding) -> tuple[Program, unity.Machine]:
    """A program with a wrong plan, minimized: by random plans, or by the finding's own kind where these have none."""
    nodes, devices = map(int, finding.machine.rpartition("-")[2].split("x"))
    machine = unity.Machine.grid(nodes, devices)
    kinds = ("random", finding.kind) if finding.kind != "random" else ("random",)

    def fails(program: Program, kind: str) -> bool:
        outcome = Outcome(program.seed)
        with warnings.catch_warnings(), jax.enable_x64(program.x64):
            warnings.simplefilter("ignore")
            with guarded(outcome, kind, machine.name):
                reference = reference_of(program)
                captured = captured_of(program.function, reference.args, program.differentiated)
                for again in range(AGAIN if kind in TRANSFORMED else 1):
                    if outcome.findings:
                        break
                    rng = random.Random(program.seed + again)
                    trials = list(source_of(kind, rng, program, reference.args, captured)(machine))
                    for start in range(0, len(trials), TOGETHER):
                        if outcome.findings:
                            break
                        judge(trials[start : start + TOGETHER], start, reference, outcome, lambda at: None)
        alike = [f for f in outcome.findings if f.fault == finding.fault]
        return any(f.fault == "wrong" or f.words[:15] == finding.words[:15] for f in alike)

    kind = next((k for k in kinds if fails(drawing, k)), None)
    return (drawing if kind is None else minimized(drawing, lambda p: fails(p, kind))), machine
