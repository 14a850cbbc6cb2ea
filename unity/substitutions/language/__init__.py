"""The rule language: terms, rules as text, typing, libraries, derivations."""
