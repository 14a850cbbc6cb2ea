"""`unity rules generate | verify | show | stats | import`."""

from __future__ import annotations

import argparse
import importlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from unity.pcg.errors import RuleError
from unity.substitutions.axioms import axioms, library_path
from unity.substitutions.draw import draw
from unity.substitutions.generator.families import FAMILIES
from unity.substitutions.generator.family import Family
from unity.substitutions.generator.generate import generate
from unity.substitutions.library import Library, load
from unity.substitutions.text import parse_rules, print_rule
from unity.verify.library import Result, verify

CONSOLE = Console()


def add_commands(rules: argparse.ArgumentParser) -> None:
    """Adds the commands below `unity rules`."""
    commands = rules.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text)
        found.set_defaults(run=run)
        return found

    made = command("generate", run_generate, "Enumerate graphs, pair equal ones, prove the pairs, and write the library.")
    made.add_argument("--max-ops", type=int, default=3, metavar="N", help="operators on a side (default 3)")
    made.add_argument("--operators", nargs="*", metavar="NAME", help="only families whose operators are all among these")
    made.add_argument("--families", nargs="*", metavar="NAME", help="only these families")
    made.add_argument("--out", type=Path, default=Path("rules/library.json"), metavar="FILE")
    made.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    made.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")

    checked = command("verify", run_verify, "Prove the rules of a library (.json) or a text (.rules) again.")
    checked.add_argument("path", nargs="?", type=Path, default=library_path())
    checked.add_argument("--operators", nargs="?", const="", metavar="MODULE:FUNCTION", help=(
        "check the parallelizations of the vocabulary's operators instead, or of your own: "
        "FUNCTION() gives an operator and its arguments"
    ))  # fmt: skip
    checked.add_argument("--execute", action="store_true", help="run every rule through JAX too, values and gradients")

    shown = command("show", run_show, "Show a rule: its text, what it was proved from, and both graphs.")
    shown.add_argument("name")
    shown.add_argument("--library", type=Path, default=library_path())

    counted = command("stats", run_stats, "Count the rules of a library.")
    counted.add_argument("path", nargs="?", type=Path, default=library_path())

    imported = command("import", run_import, "Read rules that others released, and say which are true.")
    imported.add_argument("format", choices=("flexflow", "taso"))
    imported.add_argument("path", type=Path, metavar="FILE")


def chosen_families(max_ops: int, operators: Sequence[str] | None, names: Sequence[str] | None) -> list[Family]:
    """The families to look through. Raises RuleError where none is left."""
    unknown = set(names or ()) - {f.name for f in FAMILIES}
    if unknown:
        raise RuleError(f"no family is called {', '.join(sorted(unknown))}; there are: {', '.join(f.name for f in FAMILIES)}")
    kept = [f for f in FAMILIES if not names or f.name in names]
    if operators:
        kept = [f for f in kept if {name for name, _ in f.instances} <= set(operators)]
    if not kept:
        raise RuleError("no family has only these operators; `unity rules generate --families` takes families by name")
    return [f.limited(max_ops) for f in kept]


def run_generate(options: argparse.Namespace) -> int:
    """Writes a library."""
    families = chosen_families(options.max_ops, options.operators, options.families)
    folder = Path(platformdirs.user_cache_dir("unity")) / "generate"
    if options.fresh and folder.exists():
        for path in folder.glob("*.json"):
            path.unlink()
    with Progress(console=CONSOLE) as progress:
        bar = progress.add_task("enumerating", total=1.0)
        found, outcomes = generate(
            families, axioms(), folder, options.processes, lambda text, part: progress.update(bar, description=text, completed=part)
        )
    table = Table("family", "graphs", "equal pairs", "new rules", "not proved", "seconds", title="What was found")
    for o in outcomes:
        columns = (o.counts.graphs, o.counts.pairs, len(o.rules), len(o.opened), round(o.counts.seconds, 1))
        table.add_row(o.family, *map(str, columns))
    CONSOLE.print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found.save(options.out)
    CONSOLE.print(f"{len(found)} rules, every one proved and executed, in {options.out}")
    for text in [*(f"not proved: {t}" for t in found.made["open"]), *(f"failed: {t}" for t in found.made["failed"])]:
        CONSOLE.print(text, markup=False)
    return 1 if found.made["failed"] else 0


def run_verify(options: argparse.Namespace) -> int:
    """Proves a library again, or operators."""
    if options.operators is not None:
        return _verify_operators(options.operators)
    text = options.path.suffix == ".rules"
    rules = parse_rules(_read(options.path)) if text else load(options.path).rules
    with CONSOLE.status("proving") as status:
        results = verify(rules, axioms(), options.execute, status.update)
    bad = [r for r in results if r.status != "proved"]
    for result in bad:
        CONSOLE.print(_line(result), markup=False)
    CONSOLE.print(f"{len(results) - len(bad)} of {len(results)} rules proved")
    return 1 if bad else 0


def _line(result: Result) -> str:
    return f"{print_rule(result.rule)}\n    {result.status}: {result.why}"


def _verify_operators(which: str) -> int:
    from unity.verify.vocabulary import check_users, check_vocabulary

    verdicts = check_users(*_call(which)) if which else check_vocabulary()
    bad = 0
    for name, verdict in verdicts:
        if verdict.answer != "proved":
            bad += verdict.answer == "refuted"
            CONSOLE.print(f"{name}: {verdict}", markup=False)
    CONSOLE.print(f"{sum(v.answer == 'proved' for _, v in verdicts)} of {len(verdicts)} parallelizations proved")
    return 1 if bad else 0


def _call(which: str) -> Sequence:
    module, _, name = which.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise RuleError(f"{which}: {problem}; expected MODULE:FUNCTION, a function that gives (operator, *arguments)") from None
    return found()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as problem:
        raise RuleError(f"{path}: {problem.strerror}") from None


def run_show(options: argparse.Namespace) -> int:
    """Prints a rule."""
    entry = load(options.library)[options.name]
    lines = [
        print_rule(entry.rule),
        f"proved from {', '.join(entry.axioms) or 'the types alone'}; executed at {entry.instances} instances",
        f"found in {entry.found.get('family')} with {entry.found.get('operators')} operators",
        draw(entry.rule),
    ]
    CONSOLE.print("\n".join(lines), markup=False, highlight=False)
    return 0


def run_stats(options: argparse.Namespace) -> int:
    """Counts a library."""
    found: Library = load(options.path)
    table = Table("what", "rules", title=f"{options.path}")
    kinds = Counter("parallel" if e.rule.parallel else "algebraic" for e in found.entries)
    for name, count in [*kinds.items(), ("with several outputs", sum(len(e.rule.left) > 1 for e in found.entries))]:
        table.add_row(name, str(count))
    for family, count in Counter(str(e.found.get("family")) for e in found.entries).most_common():
        table.add_row(f"found in {family}", str(count))
    used = Counter(a for e in found.entries for a in e.axioms)
    for name, count in used.most_common():
        table.add_row(f"proved from {name}", str(count))
    table.add_row("rules and their instances (dimensions, sizes, words)", str(sum(e.rule.instances for e in found.entries)))
    table.add_row("equal pairs that they cover", str(found.made.get("pairs")))
    CONSOLE.print(table)
    return 0


def run_import(options: argparse.Namespace) -> int:
    """Reads and judges others' rules."""
    from unity.substitutions.importing import import_flexflow, import_taso, report

    found = import_taso(options.path) if options.format == "taso" else import_flexflow(options.path)
    CONSOLE.print(report(found))
    return 0
