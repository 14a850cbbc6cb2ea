"""Libraries of rules: written whole, read without running anything, and refused by name where they cannot be trusted."""

import json

import pytest
from ci_cases import CI

from unity.base.errors import RuleError
from unity.cli import main
from unity.substitutions.language.axioms import axioms, default_library, library_path
from unity.substitutions.language.library import Library, LibraryEntry, load, merged
from unity.substitutions.language.text import parse_rule, parse_rules, print_rule
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.library import verify

RULES = """
add.is.add   add(x, y) = add(y, x)
cancel       combine(d, a, partition(d, a, x)) = x
merge        (matmul(x, y), matmul(x, z)) = (split(-1, matmul(x, concat(-1, y, z))).0, split(-1, matmul(x, concat(-1, y, z))).1)
"""


@pytest.fixture
def path(tmp_path):
    library = Library(tuple(LibraryEntry(r, ("an axiom",), 7, 3, {"family": "here"}) for r in parse_rules(RULES)), {"by": "hand"})
    library.save(tmp_path / "library.json")
    return tmp_path / "library.json"


def changed(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_a_library_comes_back_as_it_was(path):
    library = load(path)
    assert [print_rule(r) for r in library.rules] == [print_rule(r) for r in parse_rules(RULES)]
    assert library["cancel"].axioms == ("an axiom",)
    assert library.made == {"by": "hand"}
    before = path.read_text()
    library.save(path)
    assert path.read_text() == before


WRONG = {
    "a changed rule": (lambda d: d["rules"][0].update(rule="add(x, y) = mul(x, y)"), "rule add.is.add was changed"),
    "an open rule": (lambda d: d["rules"][1].update(status="open"), "rule cancel is open, not proved"),
    "a missing field": (lambda d: d["rules"][0].pop("hash"), r"damaged at \$\.rules\[0\]\.hash: it is missing"),
    "another schema": (lambda d: d.update(schema=99), "has schema 99"),
    "no library": (lambda d: d.pop("rules"), r"damaged at \$\.rules: it is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trusted_is_refused(path, name):
    change, message = WRONG[name]
    with pytest.raises(RuleError, match=message):
        load(changed(path, change))


def test_an_unknown_operator_is_refused_by_name(path):
    def change(data):
        data["rules"][0]["rule"] = "frobnicate(x, y) = add(x, y)"
        data["rules"][0]["hash"] = LibraryEntry(parse_rule("r x = x")).hash

    with pytest.raises(RuleError, match=r"rule add\.is\.add"):
        load(changed(path, change))


def test_a_truncated_file_is_refused(path):
    path.write_text(path.read_text()[:-30])
    with pytest.raises(RuleError, match=r"library\.json"):
        load(path)


def test_names_differ(path):
    with pytest.raises(RuleError, match="two libraries have a rule"):
        merged([load(path), load(path)])


# The library that comes with unity


def test_the_default_library_is_proved():
    library = default_library()
    assert len(library) > 100
    assert library.made["failed"] == []
    assert all(e.status == "proved" and e.instances > 0 for e in library.entries)
    known = {a.name for a in axioms()}
    assert all(set(e.axioms) <= known for e in library.entries)


def test_the_default_library_is_proved_again():
    """Some rules, through every layer: types, symbols, axioms, and JAX on devices."""
    rules = default_library().rules[:: 24 if CI else 8]
    results = verify(rules, axioms(), execute=True)
    assert [(r.rule.name, r.why) for r in results if r.status != "proved"] == []


def test_the_default_library_knows_the_axioms():
    """What proofs use can be done by rewriting with rules that were found, too.

    Not what is said of every number of groups or every window, where the families have few; and nothing of minus one.
    """
    prover = Prover(default_library().rules, values=False)
    missing = {a.name for a in axioms() if prover.prove(a).status != "proved"}
    general = {a.name for a in axioms() if a.name.startswith(("conv-", "enlarge-", "maxpool-", "avgpool-"))}
    assert missing <= general | {"sub-is-add", "add-of-opposite", "minus-minus"}


# The command line


def test_show_and_stats(path, capsys):
    assert main(["rules", "show", "merge", "--library", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "merge   (matmul(x, y), matmul(x, z)) =" in shown.replace("\n", " ")
    assert "%1 ← concat [-1]  y  z" in shown
    assert main(["rules", "stats", str(path)]) == 0
    assert "with several outputs" in capsys.readouterr().out
    assert main(["rules", "show", "nothing", "--library", str(path)]) == 1
    assert "the library has no rule nothing" in capsys.readouterr().err


def test_verify(path, tmp_path, capsys):
    assert main(["rules", "verify", str(path)]) == 0
    assert "3 of 3 rules proved" in capsys.readouterr().out
    text = tmp_path / "mine.rules"
    text.write_text(
        "good   map(f, concat(d, x, y)) = concat(d, map(f, x), map(f, y))\n"
        "false  matmul(x, y) = matmul(y, x)\n"
        "loose  map(relu, matmul(x, y)) = matmul(partition(-1, a, x), map(relu, y))\n"
    )
    assert main(["rules", "verify", str(text)]) == 1
    said = capsys.readouterr().out
    assert "refuted" in said
    assert "matmul(y, x) is" in said.replace("\n", " ")
    assert "ill-typed" in said
    assert "1 of 3 rules proved" in said


def test_verify_an_operator_of_ones_own(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "def gelu_and_norm():\n"
        "    return lambda x, y: jnp.tanh(x @ y) / 2, jnp.ones((4, 6)), jnp.ones((6, 4))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["rules", "verify", "--operators", "mine:gelu_and_norm"]) == 0
    assert "parallelizations proved" in capsys.readouterr().out
    assert main(["rules", "verify", "--operators", "mine:nothing"]) == 1
    assert "expected MODULE:FUNCTION" in capsys.readouterr().err


def test_generate(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache"))
    out = tmp_path / "made.json"
    command = ["rules", "generate", "--families", "constants", "--max-ops", "2", "--processes", "1", "--out", str(out)]
    assert main(command) == 0
    assert {e.found["family"] for e in load(out).entries} == {"constants"}
    assert main(["rules", "generate", "--families", "nothing"]) == 1
    assert "no family is called nothing" in capsys.readouterr().err


def test_the_library_lies_where_it_is_looked_for():
    assert library_path().name == "library.json"
