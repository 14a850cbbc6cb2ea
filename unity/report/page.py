"""The HTML page of a report's document, with its styles, scripts and data, and nothing from the network."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from unity.base.errors import UnityError

SCRIPTS = ("dom.js", "graph.js", "steps.js", "frontier.js", "timeline.js", "memory.js", "tables.js", "arguments.js", "main.js")


def page(document: dict[str, Any]) -> str:
    """Return the page of a document.

    Raises:
        UnityError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise UnityError("a report needs jinja2, which is not installed: pip install 'unity-jax[html]'") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    script = "\n".join(_part(name) for name in SCRIPTS)
    template = environment.from_string(_part("page.html.j2"))
    return template.render(report=document, style=_part("style.css"), script=script, data=data(document))


def data(document: dict[str, Any]) -> str:
    """Return a document as JSON for a script element, in which no text can end the element."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _part(name: str) -> str:
    return files("unity.report").joinpath(name).read_text(encoding="utf-8")
