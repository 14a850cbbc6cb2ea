"""XLA's simplifications over tensors of any rank: which are proved, how long it takes, and whether a false one ever is.

`python -m benchmarks.rank_rules` judges `rules/xla.ranks` and records the verdicts. `python -m benchmarks.rank_rules mutants
[N [SEED]]` proves N changed rules (10,000) and runs those that are proved at concrete ranks and sizes, by the denotation and by
JAX. With `composites` behind, both are about `rules/composites.ranks`; nearly half of the mutants are of rules with programs in the
place of composites."""

from __future__ import annotations

import ast
import copy
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.record import record
from unity.base.errors import RuleError
from unity.substitutions.language.axioms import folder
from unity.verify.ranks.composites import expanded
from unity.verify.ranks.execution import difference_by_jax
from unity.verify.ranks.forms import WORDED, is_group, kind_of
from unity.verify.ranks.instances import instances, refute
from unity.verify.ranks.prover import prove
from unity.verify.ranks.rule import RankRule, parse_rank_rules, signature
from unity.verify.ranks.verdict import verdict

PUBLISHED = 121  # the first rules of the file are those that TensorRight states
ALIKE = [family.split() for family in (
    "add sub mul max min div", "lt le gt ge eq ne", "logical_and logical_or logical_xor", "neg abs exp log sqrt rsqrt", "slice pad",
    "softmax log_softmax over_sum less_logarithm", "mean variance logsumexp largest", "sigmoid silu gelu gelu_tanh tanh softplus",
)]  # fmt: skip
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


def rules(file: str = "xla") -> list[RankRule]:
    return parse_rank_rules((folder() / f"{file}.ranks").read_text())


def judged(file: str) -> None:
    """Judge every rule, and record the verdicts."""
    rows: list[dict[str, Any]] = []
    for number, rule in enumerate(rules(file)):
        result = verdict(rule, execute=True)
        source = file if file != "xla" else "TensorRight" if number < PUBLISHED else "XLA"
        row = {
            "rule": rule.name,
            "source": source,
            "status": result.status,
            "seconds": result.proof.seconds,
            "lemmas": result.proof.lemmas,
        }
        rows.append(row | ({} if result.status == "proved" else {"why": result.why[:200]}))
    counts = Counter((r["source"], r["status"]) for r in rows)
    summary = {f"{source}, {status}": n for (source, status), n in sorted(counts.items())}
    slowest = max(rows, key=lambda r: r["seconds"])
    summary |= {"seconds": round(sum(r["seconds"] for r in rows), 2), "slowest": f"{slowest['rule']}: {slowest['seconds']:.2f} s"}
    print(summary)
    record("rank_rules" if file == "xla" else f"rank_rules_{file}", rows, summary=summary)


class Change(ast.NodeTransformer):
    """Changes one place of a rule, chosen at random among those that `sites` counts."""

    def __init__(self, rule: RankRule, choose: random.Random, place: int) -> None:
        shape = signature(rule)
        self.numbers = {n: [m for m, h in shape.numbers.items() if h == g and m != n] for n, g in shape.numbers.items()}
        kinds = {n: (bool(groups), kind_of(n)) for n, groups in shape.tensors.items()}
        self.tensors = {n: [m for m, k in kinds.items() if m != n and k == kind] for n, kind in kinds.items()}
        self.choose, self.place, self.sites = choose, place, 0

    def _here(self, possible: object) -> bool:
        if not possible:
            return False
        self.sites += 1
        return self.sites - 1 == self.place

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, int) and self._here(True):
            return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + self.choose.choice((-1, 1)))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id[0].islower():  # a declaration
            return node
        return ast.Subscript(node.value, self.visit(node.slice))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        others = self.numbers.get(node.id) or self.tensors.get(node.id)
        return ast.Name(self.choose.choice(others)) if others and self._here(True) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if self._here(isinstance(node.op, ast.Add | ast.Sub | ast.Mult)):
            return ast.BinOp(
                node.left,
                self.choose.choice([k for k in (ast.Add(), ast.Sub(), ast.Mult()) if type(k) is not type(node.op)]),
                node.right,
            )
        if self._here(True):
            return node.left
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if self._here(True):
            return ast.Compare(node.left, [self.choose.choice(COMPARISONS)(), *node.ops[1:]], node.comparators)
        return self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        if self._here(node.lower and node.upper and not (isinstance(node.lower, ast.Name) and node.lower.id[0].isupper())):
            return ast.Slice(node.upper, node.lower, node.step)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        alike = [n for family in ALIKE if name in family for n in family if n != name]
        if self._here(alike):
            return ast.Call(ast.Name(self.choose.choice(alike)), node.args, [])
        if self._here(len(node.args) > 1):
            return node.args[-1]
        operands = [k for k, x in enumerate(node.args) if not is_group(x)]
        if self._here(len(operands) > 1 and name not in WORDED):
            arguments = list(node.args)
            j, k = self.choose.sample(operands, 2)
            arguments[j], arguments[k] = arguments[k], arguments[j]
            return ast.Call(node.func, arguments, [])
        node.args = [self.visit(a) for a in node.args]
        return node


def mutants(file: str, seed: int) -> Iterator[RankRule]:
    """Yield different rules, each by one or two changes from one of the file."""
    choose, seen, originals = random.Random(seed), set[str](), [r for r in rules(file) if not r.obstacle]
    originals += [e for r in originals if str(e := replace(r, left=expanded(r.left), right=expanded(r.right))) != str(r)]
    known = {str(r).partition(" ")[2] for r in originals}
    while True:
        rule = copy.deepcopy(choose.choice(originals))
        for _ in range(choose.choice((1, 1, 2))):
            if rule.conditions and choose.random() < 0.15:
                removed = choose.randrange(len(rule.conditions))
                rule = replace(rule, conditions=tuple(c for k, c in enumerate(rule.conditions) if k != removed))
                continue
            parts = ["left", "right", "right", *(["conditions"] if rule.conditions else [])]
            part = choose.choice(parts)
            try:
                nodes = list(rule.conditions) if part == "conditions" else [getattr(rule, part)]
                which = choose.randrange(len(nodes))
                counted = Change(rule, choose, -1)
                counted.visit(copy.deepcopy(nodes[which]))
                if counted.sites:
                    nodes[which] = Change(rule, choose, choose.randrange(counted.sites)).visit(nodes[which])
            except RuleError:
                break
            rule = replace(rule, conditions=tuple(nodes)) if part == "conditions" else replace(rule, **{part: nodes[0]})
        body = str(rule).partition(" ")[2]
        if body not in known and body not in seen:
            seen.add(body)
            yield rule


def mutated(file: str, number: int, seed: int = 0) -> None:
    """Prove changed rules, and run those that are proved. Rules that have no meaning do not count."""
    counts: Counter[str] = Counter()
    false: list[str] = []
    start, judged = time.process_time(), 0
    for rule in mutants(file, seed):
        status = prove(rule).status
        if status == "ill-typed":
            counts[status] += 1
            continue
        result = refute(rule, 1, 60 if status == "proved" else 8)
        why, runs = result.counterexample, result.number
        if status == "proved" and not why and runs:
            why = next((w for i in instances(rule, 2, 2) if (w := difference_by_jax(rule, i))), "")
        if status == "proved" and why:
            false.append(f"{rule}: {why[:300]}")
            print("FALSE", false[-1], flush=True)
        counts[f"{status}, {'differs' if why else 'equal' if runs else 'without instances'}"] += 1
        judged += 1
        if judged % 250 == 0 or judged == number:
            seconds = round(time.process_time() - start)
            row = {
                "mutants": judged,
                "seed": seed,
                **dict(sorted(counts.items())),
                "falsely proved": len(false),
                "seconds": seconds,
            }
            print(row, flush=True)
            record("rank_mutants" if file == "xla" else f"rank_mutants_{file}", [row], false=false)
        if judged == number:
            return


if __name__ == "__main__":
    chosen = "composites" if sys.argv[-1] == "composites" else "xla"
    numbers = [int(n) for n in sys.argv[2:] if n.isdigit()]
    if sys.argv[1:2] == ["mutants"]:
        mutated(chosen, *numbers or [10_000])
    else:
        judged(chosen)
