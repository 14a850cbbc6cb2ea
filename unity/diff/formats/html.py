"""A difference as one HTML page, without scripts and without anything from the network."""

from __future__ import annotations

from itertools import pairwise

from unity.base.errors import UnityError
from unity.diff.document import Document, DocumentRow

CLASS_OF_MARK = {"+": "added", "-": "removed", "~": "changed"}
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; color: #222; background: #fff; }
  h1 { font-size: 1.3em; } h2 { font-size: 1.1em; margin-top: 2em; }
  table { border-collapse: collapse; width: 100%; }
  th, td { text-align: left; vertical-align: top; padding: .15em .8em .15em .3em; white-space: pre-wrap; }
  th { color: #666; font-weight: normal; border-bottom: 1px solid #ccc; }
  td { font-family: ui-monospace, monospace; font-size: 12px; }
  tr.heading td { font-weight: bold; border-top: 1px solid #ddd; }
  tr.added { background: #e6ffec; } tr.removed { background: #ffebe9; } tr.changed { background: #fff8c5; }
  @media (prefers-color-scheme: dark) {
    body { color: #ddd; background: #161616; } tr.heading td { border-color: #444; }
    tr.added { background: #12361f; } tr.removed { background: #441a1a; } tr.changed { background: #3a3313; }
  }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for table in tables %}<h2>{{ table.title }}</h2>
<table>
<thead><tr><th></th>{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr class="{{ classes.get(row.mark, '') }}{{ ' heading' if row.heading }}"><td>{{ row.mark }}</td>
{%- for cell, columns in spans(row) %}<td{% if columns > 1 %} colspan="{{ columns }}"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table>
{% endfor %}</body>
</html>
"""


def html(document: Document) -> str:
    """Return a document as an HTML page.

    Raises:
        UnityError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise UnityError("HTML needs jinja2, which is not installed: pip install 'unity-jax[html]'") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(PAGE).render(title=document.title, tables=document.tables, classes=CLASS_OF_MARK, spans=spans)


def spans(row: DocumentRow) -> list[tuple[str, int]]:
    """Return the cells of a row, each with the number of columns that it spans: in a heading, also the empty ones after it."""
    if not row.heading:
        return [(cell, 1) for cell in row.cells]
    filled = [k for k, cell in enumerate(row.cells) if cell or not k]
    return [(row.cells[k], end - k) for k, end in pairwise([*filled, len(row.cells)])]
