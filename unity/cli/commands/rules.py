"""The command `unity rules generate | verify | show | stats | import`."""

from __future__ import annotations

import argparse
import difflib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs

from unity.base.errors import RuleError
from unity.cli.arguments import add_json, count
from unity.cli.files import write
from unity.cli.help_format import HelpFormatter
from unity.cli.model import METAVAR, result_of
from unity.cli.output import print_json, print_table, progress, result_console, stage
from unity.substitutions.generator.families import FAMILIES
from unity.substitutions.generator.family import Family
from unity.substitutions.generator.generate import generate
from unity.substitutions.generator.vocabulary_proofs import check_users, check_vocabulary
from unity.substitutions.importing import import_flexflow, import_taso
from unity.substitutions.importing import report as import_report
from unity.substitutions.language.axioms import axioms, library_path
from unity.substitutions.language.drawing import draw
from unity.substitutions.language.library import Library, LibraryEntry, load
from unity.substitutions.language.text import parse_rules, print_rule
from unity.verify.proofs.library import RuleVerdict, verify
from unity.verify.proofs.loop_rules import loop_faults
from unity.verify.ranks.forms import Inexpressible
from unity.verify.ranks.rule import parse_rank_rules
from unity.verify.ranks.verdict import verdicts

HELP = "generate, verify, show and import substitution rules"
OPERATOR_FORM = "expected MODULE:FUNCTION, a function that gives (operator, *arguments)"


def add_arguments(rules: argparse.ArgumentParser) -> None:
    """Describe `unity rules` and its subcommands."""
    rules.description = "Generates, proves and shows the rules by which programs are rewritten."
    rules.epilog = "examples:\n  unity rules stats\n  unity rules verify mine.rules\n  unity rules show merge"
    commands = rules.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, *examples: str) -> argparse.ArgumentParser:
        epilog = "\n".join(("examples:", *(f"  unity rules {name} {words}".rstrip() for words in examples)))
        parser = commands.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=HelpFormatter)
        parser.set_defaults(run=run)
        add_json(parser)
        return parser

    text = "Enumerate graphs, pair equal ones, prove the pairs, and write the library."
    generate_parser = command("generate", run_generate, text, "", "--max-ops 2 --families constants --out constants.json")
    generate_parser.add_argument("--max-ops", type=count, default=3, metavar="N", help="operators on a side (default 3)")
    generate_parser.add_argument("--operators", nargs="*", metavar="NAME", help="only families whose operators are all among these")
    generate_parser.add_argument("--families", nargs="*", metavar="NAME", help="only these families")
    generate_parser.add_argument("--out", type=Path, default=Path("rules/library.json"), metavar="FILE")
    generate_parser.add_argument("--processes", type=count, default=os.cpu_count() or 1, metavar="N")
    generate_parser.add_argument("--fresh", action="store_true", help="discard the results of earlier runs")

    text = "Prove the rules of a library (.json) or a text (.rules, .ranks) again. The exit status is 1 if one is not proved."
    examples = "", "mine.rules -o mine.json", "rules/xla.ranks", "--operators", "--operators mymodel:operator"
    verify_parser = command("verify", run_verify, text, *examples)
    verify_parser.add_argument("path", nargs="?", type=Path, default=library_path(), metavar="FILE")
    verify_parser.add_argument("--operators", nargs="?", const="", metavar=METAVAR, help=(
        "check the parallelizations of the vocabulary's operators instead, or of your own: "
        "FUNCTION() gives an operator and its arguments"
    ))  # fmt: skip
    verify_parser.add_argument("--execute", action="store_true", help="run every rule through JAX too, values and gradients")
    verify_parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="write those that are proved as a library, for rules="
    )

    text = "Show rules: their text, the axioms that prove them, and both graphs."
    show_parser = command("show", run_show, text, "merge", "'matmul*' --json")
    show_parser.add_argument("name", metavar="NAME", help="a rule, or all of a pattern: 'matmul*'")
    show_parser.add_argument("--library", type=Path, default=library_path(), metavar="FILE")

    stats_parser = command("stats", run_stats, "Count the rules of a library.", "", "mine.json --json")
    stats_parser.add_argument("path", nargs="?", type=Path, default=library_path(), metavar="FILE")

    text = "Read the rules that another system released, and print which are proved."
    import_parser = command("import", run_import, text, "taso graph_subst.pb", "flexflow rules.json -o theirs.rules")
    import_parser.add_argument("format", choices=("flexflow", "taso"))
    import_parser.add_argument("path", type=Path, metavar="FILE")
    import_parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write those that are proved as text (.rules)")


def chosen_families(max_ops: int, operators: Sequence[str] | None, names: Sequence[str] | None) -> list[Family]:
    """Return the families of graphs to enumerate.

    Raises:
        RuleError: a family does not exist, or none is left.
    """
    unknown = set(names or ()) - {f.name for f in FAMILIES}
    if unknown:
        raise RuleError(f"no family is called {', '.join(sorted(unknown))}; there are: {', '.join(f.name for f in FAMILIES)}")
    families = [f for f in FAMILIES if not names or f.name in names]
    if operators:
        families = [f for f in families if {name for name, _ in f.instances} <= set(operators)]
    if not families:
        raise RuleError("no family has only these operators; `unity rules generate --families` takes families by name")
    return [f.limited(max_ops) for f in families]


def run_generate(options: argparse.Namespace) -> int:
    """Enumerate graphs, prove the equal pairs, and write the library."""
    families = chosen_families(options.max_ops, options.operators, options.families)
    folder = Path(platformdirs.user_cache_dir("unity")) / "generate"
    if options.fresh and folder.exists():
        for path in folder.glob("*.json"):
            path.unlink()
    with progress() as shown:
        bar = shown.add_task("enumerating", total=1.0)
        library, outcomes = generate(
            families, axioms(), folder, options.processes, lambda text, part: shown.update(bar, description=text, completed=part)
        )
    library = library.named_as(load(library_path()))
    nameless = [e.rule.name for e in library.entries if not e.reason]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    library.save(options.out)
    columns = ("family", "graphs", "equal pairs", "new rules", "not proved", "seconds")
    rows = [(o.family, o.counts.graphs, o.counts.pairs, len(o.rules), len(o.opened), round(o.counts.seconds, 1)) for o in outcomes]
    if options.json:
        failures = {k: library.made[k] for k in ("open", "failed")}
        family_rows = [dict(zip(columns, row, strict=True)) for row in rows]
        print_json(
            {"rules": len(library), "file": str(options.out), "families": family_rows, "without_names": nameless, **failures}
        )
    else:
        print_table("What was found", columns, rows)
        print(f"{len(library)} rules, every one proved and executed, in {options.out}")
        if nameless:
            print(f"{len(nameless)} rules have no name of a person's yet: write name, reason, pays and former (the name now):")
            print("\n".join(f"    {name}" for name in nameless))
        for text in [*(f"not proved: {t}" for t in library.made["open"]), *(f"failed: {t}" for t in library.made["failed"])]:
            print(text)
    return 1 if library.made["failed"] else 0


def run_verify(options: argparse.Namespace) -> int:
    """Prove the rules of a library, or the parallelizations of operators."""
    if options.operators is not None:
        return _verify_operators(options.operators, options.json)
    if options.path.suffix == ".ranks":
        return _verify_ranks(options)
    is_text = options.path.suffix == ".rules"
    loops = () if is_text else load(options.path).loops
    rules = parse_rules(_read(options.path, RuleError.docs)) if is_text else load(options.path).rules
    with stage("proving") as say:
        proofs = verify(rules, axioms(), options.execute, say)
        faults = loop_faults() if loops else []
    proved, unproved = [r for r in proofs if r.status == "proved"], [r for r in proofs if r.status != "proved"]
    if options.out is not None:
        library = _library(proved, options.path)
        (library if is_text else library.named_as(load(options.path))).save(options.out)
    if options.json:
        rows = [{"name": r.rule.name, "rule": print_rule(r.rule), "status": r.status, "why": r.why} for r in proofs]
        print_json({"proved": len(proved), "of": len(proofs), "results": rows, "loops": [r.name for r in loops], "faults": faults})
    else:
        for result in unproved:
            print(f"{print_rule(result.rule)}\n    {result.status}: {result.why}")
        print(f"{len(proved)} of {len(proofs)} rules proved{f', in {options.out}' if options.out is not None else ''}")
        if loops:
            print("\n".join(faults) or f"{len(loops)} rules of loops proved, by induction and lemmas about single steps")
    return 1 if unproved or faults else 0


def _library(proved: Sequence[RuleVerdict], path: Path) -> Library:
    """Return proved rules as a library, which the option `rules=` of `unity.optimize` takes."""
    entries = (LibraryEntry(r.rule, r.proof.axioms, r.proof.work, r.check.instances, {"family": path.stem}) for r in proved)
    return Library(tuple(entries), {"from": path.name})


def _verify_ranks(options: argparse.Namespace) -> int:
    """Judge rules over groups of dimensions. Return 1 if one is not proved, and its text does not say why."""
    if options.out is not None:
        raise RuleError("rules of every rank are not written as a library; expected -o with a text of .rules")
    with stage("proving") as say:
        results = verdicts(parse_rank_rules(_read(options.path, Inexpressible.docs)), options.execute, say)
    counts = Counter(r.status for r in results)
    failures = [r for r in results if not r.expected]
    if options.json:
        rows = [
            {"name": r.rule.name, "line": r.rule.line, "rule": str(r.rule), "status": r.status, "why": r.why}
            | {"seconds": round(r.proof.seconds, 3)}
            for r in results
        ]
        print_json({"proved": counts["proved"], "of": len(results), "results": rows})
    else:
        for result in failures:
            link = f" (docs: {Inexpressible.docs})" if result.status == "ill-typed" else ""
            print(f"{options.path}:{result.rule.line}: {result.rule}\n    {result.status}: {result.why}{link}")
        marked = sum(r.expected and r.status == "open" for r in results)
        rest = f"{counts['not expressible']} not expressible, {marked} open for a reason that the text gives"
        print(f"{counts['proved']} of {len(results)} rules proved for every rank and size, {rest}")
    return 1 if failures else 0


def _verify_operators(which: str, as_data: bool) -> int:
    with stage("proving"):
        verdicts = check_users(*result_of(which, OPERATOR_FORM)) if which else check_vocabulary()
    proved = sum(v.answer == "proved" for _, v in verdicts)
    if as_data:
        rows = [{"operator": name, "answer": v.answer, "says": str(v)} for name, v in verdicts]
        print_json({"proved": proved, "of": len(verdicts), "results": rows})
    else:
        for name, verdict in verdicts:
            if verdict.answer != "proved":
                print(f"{name}: {verdict}")
        print(f"{proved} of {len(verdicts)} parallelizations proved")
    return 1 if any(v.answer == "refuted" for _, v in verdicts) else 0


def _read(path: Path, page: str) -> str:
    """Return a text of rules; an error about its contents refers to a page of the documentation."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise RuleError(f"{path}: no text in UTF-8, by byte {problem.start} (docs: {page})") from None


def run_show(options: argparse.Namespace) -> int:
    """Print the rules that a pattern matches."""
    library = load(options.library)
    entries, loops = library.matching(options.name), library.matching_loops(options.name)
    if not (entries or loops):
        near = ", ".join(difflib.get_close_matches(options.name, library.names))
        raise RuleError(f"the library has no rule {options.name}" + (f"; near it are {near}" if near else ""))
    if options.json:
        print_json([*(e.to_json() for e in entries), *(rule.to_json() for rule in loops)])
        return 0
    for rule in loops:
        print(f"{rule.name}   {rule.statement}")
        print(f"{rule.reason} Where it pays: {rule.pays}.")
        print("proved by induction on the steps, and by lemmas about single steps (docs: rules#rules-of-loops)")
    for entry in entries:
        print(print_rule(entry.rule))
        if entry.reason:
            print(f"{entry.reason} Where it pays: {entry.pays}.")
        print(f"proved from {', '.join(entry.axioms) or 'the types alone'}; executed at {entry.instances} instances")
        if "operators" in entry.found:
            print(f"found in {entry.found.get('family')} with {entry.found['operators']} operators")
        print(draw(entry.rule))
    return 0


def run_stats(options: argparse.Namespace) -> int:
    """Print how many rules of each kind a library has."""
    counts = statistics(load(options.path))
    if options.json:
        print_json(counts)
    else:
        print_table(str(options.path), ("what", "rules"), counts.items())
    return 0


def statistics(library: Library) -> dict[str, int | None]:
    """Return the number of rules by kind, by the family they were found in, and by the axioms that prove them."""
    kinds = Counter("parallel" if e.rule.parallel else "algebraic" for e in library.entries)
    families = Counter(str(e.found.get("family")) for e in library.entries).most_common()
    used = Counter(a for e in library.entries for a in e.axioms).most_common()
    return {
        **kinds,
        "of loops": len(library.loops),
        "with a name and a reason": sum(bool(e.reason) for e in library.entries),
        "with several outputs": sum(len(e.rule.left) > 1 for e in library.entries),
        **{f"found in {family}": number for family, number in families},
        **{f"proved from {name}": number for name, number in used},
        "rules and their instances (dimensions, sizes, words)": sum(e.rule.instances for e in library.entries),
        "equal pairs that they cover": library.made.get("pairs"),
    }


def run_import(options: argparse.Namespace) -> int:
    """Read the rules of another system, and print which are proved."""
    with stage("judging"):
        imported = import_taso(options.path) if options.format == "taso" else import_flexflow(options.path)
    proved = [i for i in imported if i.verdict.status == "proved"]
    if options.out is not None:
        write("\n".join(i.text for i in proved), options.out)
    if options.json:
        rows = [{"name": i.name, "rule": i.rule and i.text, "status": i.verdict.status, "why": i.verdict.why} for i in imported]
        print_json({"proved": len(proved), "of": len(imported), "results": rows})
    else:
        result_console().print(import_report(imported))
    return 0
