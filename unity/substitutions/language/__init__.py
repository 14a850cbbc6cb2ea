"""The rule language: terms, rules and their text form, type checking, libraries, derivations."""
