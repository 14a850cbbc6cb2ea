"""Every rule of the library has a name that a person gave, a reason, and the models or machines on which it pays."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import unity
from unity.cli import main
from unity.constraints.excluded_rules import without
from unity.constraints.kinds import WithoutRules
from unity.plan.files.plan_file import sealed
from unity.substitutions.language.axioms import default_library, library_path
from unity.substitutions.language.library import Library, LibraryEntry, load
from unity.substitutions.language.text import parse_rule

LIBRARY = default_library()
GENERATED = "matmul-matmul.is.matmul-matmul"  # the former name of regroup-products


def test_every_rule_has_a_name_of_its_own() -> None:
    names = [entry.rule.name for entry in LIBRARY.entries]
    assert len(set(names)) == len({e.former for e in LIBRARY.entries} | {e.hash for e in LIBRARY.entries}) / 2 == len(LIBRARY)
    for name in names:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name), name  # words, without numbers


def test_every_rule_has_a_reason_and_a_place_where_it_pays() -> None:
    for entry in LIBRARY.entries:
        assert re.fullmatch(r"[A-Z][^\n]{10,108}\.", entry.reason), entry.rule.name
        assert 0 < len(entry.pays.split()) <= 6, entry.rule.name


def test_names_move_no_rule_of_the_file(tmp_path: Path) -> None:
    LIBRARY.save(tmp_path / "library.json")
    assert (tmp_path / "library.json").read_text() == library_path().read_text()
    assert [e.former for e in LIBRARY.entries] == sorted(e.former for e in LIBRARY.entries)


def test_former_names_are_accepted_where_users_and_files_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert LIBRARY[GENERATED] is LIBRARY["regroup-products"]
    for pattern in (GENERATED, "regroup-products"):
        left = without(LIBRARY, [WithoutRules((pattern,))])
        assert {e.rule.name for e in LIBRARY.entries} - {e.rule.name for e in left.entries} == {"regroup-products"}
    left = without(LIBRARY, [WithoutRules(("merge-*", "merge-adds")), WithoutRules((GENERATED, "regroup-products"))])
    names = {e.rule.name for e in LIBRARY.entries}
    assert names - {e.rule.name for e in left.entries} == {"regroup-products", *(n for n in names if n.startswith("merge-"))}
    assert main(["rules", "show", GENERATED]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("regroup-products   matmul(matmul(x, y), z) = ")
    assert "Three matrices may be multiplied from either end: the order with less arithmetic pays." in shown
    assert "Where it pays: low-rank layers, adapters." in shown


def test_rules_that_are_generated_again_keep_their_names() -> None:
    known = LIBRARY["merge-shared-input"]
    again = LibraryEntry(replace(known.rule, name="split-matmul.is.7"))
    new = LibraryEntry(parse_rule("tanh-tanh.is.tanh map(tanh, map(tanh, x)) = map(tanh, x)"))
    named = Library((again, new)).named_as(LIBRARY)
    assert [e.rule.name for e in named.entries] == ["merge-shared-input", "tanh-tanh.is.tanh"]
    assert (named.entries[0].reason, named.entries[0].former) == (known.reason, known.former)
    assert not named.entries[1].reason


def test_libraries_without_reasons_are_read(tmp_path: Path) -> None:
    data = json.loads(library_path().read_text())
    rows = [{k: v for k, v in row.items() if k not in ("reason", "pays", "former")} for row in data["rules"]]
    (tmp_path / "old.json").write_text(json.dumps({**data, "rules": rows}))
    assert [e.reason for e in load(tmp_path / "old.json").entries] == [""] * len(LIBRARY)


@pytest.mark.usefixtures("own_cache")
def test_a_plan_with_generated_names_is_loaded_and_shown_with_the_names_of_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fn(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return ((x @ a @ b) ** 2).mean()

    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 256), (256, 1024), (1024, 8))]
    plan = unity.optimize(fn, *args, machine=unity.Machine.grid(1, 2, "v100"), progress=False)
    path = tmp_path / "plan.json"
    plan.files.save(path)
    data = json.loads(path.read_text().replace('"regroup-products', f'"{GENERATED}'))
    path.write_text(json.dumps(sealed(data)))
    assert GENERATED in path.read_text()
    again = unity.load(path, fn, *args)
    again.program.check_derivation()
    assert "rewritten by 1 × regroup-products" in str(again)
    for words in (["explain", str(path)], ["show", str(path)], ["diff", str(path)]):
        main(words)
        shown = capsys.readouterr().out
        assert "regroup-products" in shown
        assert GENERATED not in shown
