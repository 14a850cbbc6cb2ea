"""Runs the fuzzer: worker processes with a time limit for each program, results as JSON.

    python -m benchmarks.fuzz --workers 2 --minutes 30 --seed 0       # programs 0, 1, 2, …
    python -m benchmarks.fuzz --resume FILE --plans 100000             # go on from the results in a file
    python -m benchmarks.fuzz --kinds loops,padding                    # programs and plans of some kinds (`models.FOCUS`) alone
    python -m benchmarks.fuzz --program 1234                           # one program, its source and what is wrong, minimized
    python -m benchmarks.fuzz --rules 10000 --imported FILE            # the library, its mutants, and imported rules

A plan counts if it is a distinct parallel graph of its program that was compiled and run, and whose results and gradients were
compared with the function's. A worker that ends, or needs too long for a program, is replaced, and its program is a finding.
Programs that needed too long are run again by `--resume`, since other work on the machine may have been the cause.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

DEVICES = 12
LIMIT, WALL = 240.0, 1800.0  # seconds for one program: of processors, and by the clock
TOO_LONG = "no result after"
STUCK = 20  # seconds until XLA ends a process whose devices wait for each other
ONLY, KINDS = "UNITY_FUZZ_ONLY", "UNITY_FUZZ_KINDS"  # the variables that name operations, and kinds of plans
CACHE = tempfile.mkdtemp(prefix="unity-fuzz-")
RECYCLED = 150  # programs of one worker process
FLAGS = f"--xla_force_host_platform_device_count={DEVICES} --xla_cpu_collective_call_terminate_timeout_seconds={STUCK}"
if version("jaxlib").startswith("0.10."):  # of newer ones XLA ends the process at the first of these flags
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith(("0.10.", "0.11.", "0.12.")):  # without kernels of which some crash or compute something else
    FLAGS += " --xla_cpu_experimental_ynn_fusion_type="
FLAGS += f" --xla_cpu_collective_call_warn_stuck_timeout_seconds={STUCK // 2}"


def environment() -> dict[str, str]:
    """A worker's environment: its devices, and a cache of its own."""
    return {
        **os.environ,
        "XDG_CACHE_HOME": CACHE,
        "XLA_FLAGS": FLAGS,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",
    }


def named(variable: str) -> list[str]:
    """The names in a variable of the environment."""
    return [name for name in os.environ.get(variable, "").split(",") if name]


def worker() -> None:
    """Reads seeds from its input, and writes what came of each program, a line of JSON each."""
    from benchmarks.fuzz.examine import examine

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print

    def say(at: str) -> None:
        out.write(json.dumps({"at": at}) + "\n")

    gc.disable()  # tracing makes millions of objects that live on
    for number, line in enumerate(sys.stdin):
        outcome = examine(int(line), say, named(ONLY), named(KINDS))
        out.write(json.dumps({"outcome": outcome.to_json()}) + "\n")
        if number % 8 == 7:
            gc.collect()


def processor_seconds(process: subprocess.Popen[str]) -> float:
    """The seconds of processors that a process has taken; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Hand:
    """A worker process, seen from outside."""

    process: subprocess.Popen[str]
    log: TextIO
    seed: int = -1
    at: str = ""
    since: float = 0.0
    spent: float = 0.0  # of processors, before the program
    done: int = 0

    @property
    def slow(self) -> bool:
        """Whether its program has taken too long."""
        return processor_seconds(self.process) - self.spent > LIMIT or time.monotonic() - self.since > WALL


@dataclass
class Tally:
    """What came of all programs so far."""

    seed: int
    next: int
    programs: int = 0
    skipped: int = 0
    seconds: float = 0.0  # of processors
    wall: float = 0.0
    plans: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)  # plans of programs with each kind of operation
    primitives: Counter[str] = field(default_factory=Counter)
    devices: Counter[str] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    depths: Counter[str] = field(default_factory=Counter)
    orders: Counter[str] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)  # plans run eagerly, loaded, exported, checked
    refused: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)  # plans with NaN for infinities, and nothing wrong
    skips: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    again: list[int] = field(default_factory=list)  # programs to run once more

    def retry(self) -> None:
        """Forgets the programs that took too long, to run them again."""
        late = [row for row in self.findings if any(f["words"].startswith(TOO_LONG) for f in row["findings"])]
        self.findings = [row for row in self.findings if row not in late]
        self.again += [row["seed"] for row in late]

    def following(self) -> int:
        """The next program to run."""
        if self.again:
            return self.again.pop()
        self.next += 1
        return self.next - 1

    def enter(self, outcome: dict[str, Any]) -> None:
        n = sum(outcome["plans"].values())
        self.programs += 1
        self.seconds += outcome["seconds"]
        if outcome["skipped"]:
            self.skipped += 1
            self.skips[outcome["skipped"][:120]] += 1
        for name in ("plans", "devices", "lives", "refused", "known"):
            getattr(self, name).update(outcome[name])
        for name, key in (("types", "dtype"), ("depths", "depth"), ("orders", "order")):
            getattr(self, name)[str(outcome[key])] += n
        self.operations.update(dict.fromkeys(outcome["kinds"], n))
        self.primitives.update(dict.fromkeys(outcome["primitives"], n))
        if outcome["findings"]:
            self.findings.append({k: outcome[k] for k in ("seed", "findings", "source", "dtype")} | {"plans": n})

    def to_json(self) -> dict[str, Any]:
        return {k: dict(v.most_common()) if isinstance(v, Counter) else v for k, v in vars(self).items()}

    @classmethod
    def read(cls, path: Path) -> Tally:
        data = json.loads(path.read_text())
        data = data["rows"][0] if "rows" in data else data
        counters = {k for k, v in vars(cls(0, 0)).items() if isinstance(v, Counter)}
        tally = cls(data["seed"], data["next"])
        for key in vars(tally):
            setattr(tally, key, Counter(data.get(key, {})) if key in counters else data.get(key, getattr(tally, key)))
        tally.retry()
        return tally

    @property
    def total(self) -> int:
        return self.plans.total()

    @property
    def line(self) -> str:
        wrong = Counter(f["fault"] for row in self.findings for f in row["findings"])
        per = self.seconds / max(self.total, 1)
        plans = f"{self.programs} programs, {self.total} plans, {per:.3f} s of a processor each"
        known = f"{self.known.total()} plans with NaN for infinities"
        return f"{plans}; {len(self.findings)} programs with findings ({dict(wrong)}), {known}"


class Pool:
    """Worker processes, and a queue of what they write."""

    def __init__(self, count: int, tally: Tally, folder: Path) -> None:
        self.tally, self.folder = tally, folder
        self.lines: queue.Queue[tuple[Hand, str | None]] = queue.Queue()
        self.hands = [self.hire() for _ in range(count)]

    def hire(self) -> Hand:
        log = (self.folder / f"worker-{time.time_ns()}.log").open("w+")
        command = [sys.executable, "-m", "benchmarks.fuzz", "worker"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)
        hand = Hand(process, log)
        threading.Thread(target=self.listen, args=(hand,), daemon=True).start()
        self.give(hand)
        return hand

    def listen(self, hand: Hand) -> None:
        assert hand.process.stdout is not None
        for line in hand.process.stdout:
            self.lines.put((hand, line))
        self.lines.put((hand, None))

    def give(self, hand: Hand) -> None:
        """Gives a worker the next program."""
        assert hand.process.stdin is not None
        hand.seed, hand.at, hand.since, hand.spent = self.tally.following(), "", time.monotonic(), processor_seconds(hand.process)
        hand.process.stdin.write(f"{hand.seed}\n")
        hand.process.stdin.flush()

    def run(self, until: float, plans: int, save: Any) -> None:
        saved = time.monotonic()
        while time.monotonic() < until and self.tally.total < plans:
            try:
                hand, line = self.lines.get(timeout=1.0)
            except queue.Empty:
                hand, line = None, ""
            if hand in self.hands:
                self.hear(hand, line)
            for slow in [h for h in self.hands if h.slow]:
                slow.process.kill()
                self.replace(slow, f"{TOO_LONG} {time.monotonic() - slow.since:.0f} s")
            if time.monotonic() - saved > 20:
                saved = time.monotonic()
                save()
        for hand in self.hands:
            hand.process.kill()
        self.tally.again += [hand.seed for hand in self.hands]

    def hear(self, hand: Hand, line: str | None) -> None:
        if line is None:
            self.replace(hand, f"the process ended with {hand.process.wait()}")
            return
        said = json.loads(line)
        hand.at = said.get("at", hand.at)
        if "outcome" in said:
            self.tally.enter(said["outcome"])
            hand.done += 1
            if hand.done >= RECYCLED:
                self.hands.remove(hand)
                hand.process.kill()
                self.hands.append(self.hire())
            else:
                self.give(hand)

    def replace(self, hand: Hand, what: str) -> None:
        """Notes a program that ended its process, and hires another."""
        hand.log.seek(0)
        text = [x for x in hand.log.read().splitlines() if x.strip()]
        telling = [x for x in text if any(word in x for word in ("Check failed", "Termination", "endezvous"))]
        fatal = next(iter(telling or text[-1:]), "")
        finding = {
            "fault": "ended",
            "kind": "",
            "machine": "",
            "words": f"{what}: {hand.at}: {fatal[:400]}",
            "where": "",
            "number": -1,
        }
        self.tally.findings.append({"seed": hand.seed, "findings": [finding], "source": "", "dtype": "", "plans": 0})
        self.hands.remove(hand)
        self.hands.append(self.hire())


def fuzz(options: argparse.Namespace) -> None:
    from benchmarks.record import record

    path = Path(options.resume or options.out)
    tally = Tally.read(path) if options.resume and path.exists() else Tally(options.seed, options.seed)
    started, before = time.monotonic(), tally.wall
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f"{path.stem}.logs"
    folder.mkdir(exist_ok=True)
    pool = Pool(options.workers, tally, folder)

    def save() -> None:
        tally.wall = before + time.monotonic() - started
        path.write_text(json.dumps(tally.to_json(), indent=1))
        print(f"{tally.wall:.0f} s: {tally.line}", flush=True)

    pool.run(started + 60 * options.minutes, options.plans, save)
    shorten(tally, options.minimize)
    save()
    report(tally)
    if options.record:
        kinds = f" --kinds {options.kinds}" if options.kinds else ""
        command = f"python -m benchmarks.fuzz --workers {options.workers} --seed {tally.seed}{kinds}"
        record("fuzz", [tally.to_json()], command=command, seeds=[tally.seed, tally.next])


def shorten(tally: Tally, most: int) -> None:
    """Minimizes one program of each fault, in a process of its own, and keeps it as a test, in the finding's row."""
    seen = {row["fault"] for row in tally.findings if row.get("test")}
    for row in tally.findings:
        row["fault"] = " ".join((row["findings"][0]["fault"], re.sub(r"[\d.\[\]]+", "", row["findings"][0]["words"])[:60]))
        if len(seen) < most and row["fault"] not in seen:
            seen.add(row["fault"])
            command = [sys.executable, "-m", "benchmarks.fuzz", "--program", str(row["seed"])]
            try:
                said = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False).stdout
            except subprocess.TimeoutExpired:
                continue
            row["test"] = said.partition("\ndef test_")[2] and "def test_" + said.partition("\ndef test_")[2]


def report(tally: Tally) -> None:
    """Prints what was exercised, and what was not."""
    from unity.pcg.operators.table import TABLE

    print(tally.line)
    for name in ("plans", "lives", "devices", "types", "depths", "orders", "operations"):
        print(f"plans by {name}: " + ", ".join(f"{k} {n}" for k, n in getattr(tally, name).most_common()))
    never = sorted(set(TABLE) - set(tally.primitives))
    print(f"{len(TABLE) - len(never)} of {len(TABLE)} entries of the operator table, never: {', '.join(never)}")
    print(
        f"{tally.skipped} programs that JAX itself does not run: " + "; ".join(f"{n}x {k}" for k, n in tally.skips.most_common(4))
    )
    for row in tally.findings:
        print(f"python -m benchmarks.fuzz --program {row['seed']}: {row['findings'][0]['words'][:160]}\n{row.get('test', '')}")
    for text, n in tally.refused.most_common(8):
        print(f"refused {n}x: {text[:250]}")


def show(seed: int) -> None:
    """One program: its source, what is wrong with its plans, and the smallest program that shows it, as a test."""
    from benchmarks.fuzz.examine import examine, smallest
    from benchmarks.fuzz.minimize import as_test
    from benchmarks.fuzz.programs import draw_program

    outcome = examine(seed, lambda at: print(f"  … {at}", file=sys.stderr, flush=True), kinds=named(KINDS))
    print(outcome.source)
    print(f"{dict(outcome.plans)} on {dict(outcome.devices)}, refused: {dict(outcome.refused)} {outcome.skipped}")
    print(f"NaN for infinities: {dict(outcome.known)}")
    for finding in outcome.findings:
        print(finding)
    for finding in outcome.findings[:1]:
        program, machine = smallest(draw_program(seed, kinds=named(KINDS)), finding)
        sizes = [level.size for level in machine.levels]
        print(as_test(program, f"program_{seed}", sizes[0], sizes[-1], finding.words[:160]))


def main() -> None:
    if sys.argv[1:] == ["worker"]:
        worker()
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="the first program's; each program has the next")
    parser.add_argument("--out", default="benchmarks/results/fuzz.partial.json")
    parser.add_argument("--resume", help="results to go on from")
    parser.add_argument("--record", action="store_true", help="also write benchmarks/results/fuzz.json, or fuzz_rules.json")
    parser.add_argument("--minimize", type=int, default=4, help="faults of which a program is minimized")
    parser.add_argument("--only", default="", help="operations, with commas: programs without any of them are left out")
    parser.add_argument("--kinds", default="", help="kinds of plans, with commas, of which alone there are any: loops, padding, …")
    parser.add_argument("--program", type=int, help="the seed of one program")
    parser.add_argument(
        "--rules", type=int, metavar="MUTANTS", help="rules in the place of plans: the library's, and so many mutants"
    )
    parser.add_argument("--imported", nargs="*", default=[], metavar="FILE", help="with --rules: rules in TASO's files")
    options = parser.parse_args()
    os.environ[ONLY], os.environ[KINDS] = options.only, options.kinds
    if options.kinds:
        from benchmarks.fuzz.operations.models import FOCUS

        if unknown := set(named(KINDS)) - set(FOCUS):
            parser.error(f"--kinds: expected some of {', '.join(FOCUS)}, got {', '.join(sorted(unknown))}")
    if options.rules is not None:
        from benchmarks.fuzz.rules import main as rules

        rules(options)
    elif options.program is None:
        fuzz(options)
    elif "XLA_FLAGS" in os.environ and str(DEVICES) in os.environ["XLA_FLAGS"]:
        show(options.program)
    else:
        subprocess.run([sys.executable, "-m", "benchmarks.fuzz", *sys.argv[1:]], env=environment(), check=False)


if __name__ == "__main__":
    main()
