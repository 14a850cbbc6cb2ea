"""The page: every table and figure, as Markdown and as HTML (jinja2, the extra `html`)."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.seeds.beside import beside
from benchmarks.seeds.figures import drawn
from benchmarks.seeds.results import Results
from benchmarks.seeds.tables import tables
from unity.base.atomic_files import write

ABOUT = (
    "Every system's search on this project's models, machines and price list: the seconds of a step are predicted ones, the "
    "same for all. The papers measured theirs on their clusters, so ratios are compared, not seconds. Figures of the papers "
    "that are only drawn there are not copied; what their text and tables say stands beside what was found here.",
    "The papers' baselines ran in other frameworks, with overheads that no price list has. Recurrent networks are "
    "scanned here, where FlexFlow unrolls them, so single steps on single devices are not among our choices; step by step, and "
    "with layers on devices of their own, they are simulated in a table of their own.",
)

MARKDOWN = """# The seeds, side by side

{% for line in about %}{{ line }}

{% endfor %}Written {{ date }}; {{ versions }}. {{ done }} of {{ count }} cases have a result.
{% for table in tables %}
## {{ table.title }}
{% if table.rows %}
| {{ table.columns | join(" | ") }} |
|{{ " --- |" * table.columns | length }}
{% for row in table.rows %}| {{ row | join(" | ") }} |
{% endfor %}{% else %}
None.
{% endif %}{% for note in table.notes %}
- {{ note }}{% endfor %}
{% endfor %}{% for file, title in figures %}
## {{ title }}

![{{ title }}]({{ file }})
{% endfor %}"""

HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>The seeds, side by side</title>
<style>body{font-family:sans-serif;max-width:100em;margin:2em auto}table{border-collapse:collapse;font-size:80%}
td,th{border:1px solid #ccc;padding:.2em .5em;text-align:left}img{max-width:100%}</style></head><body>
<h1>The seeds, side by side</h1>
{% for line in about %}<p>{{ line }}</p>
{% endfor %}<p>Written {{ date }}; {{ versions }}. {{ done }} of {{ count }} cases have a result.</p>
{% for table in tables %}<h2>{{ table.title }}</h2>
{% if table.rows %}<table><tr>{% for c in table.columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% else %}<p>None.</p>{% endif %}
{% if table.notes %}<ul>{% for note in table.notes %}<li>{{ note }}</li>{% endfor %}</ul>{% endif %}
{% endfor %}{% for file, title in figures %}<h2>{{ title }}</h2><img src="{{ file }}" alt="{{ title }}">
{% endfor %}</body></html>
"""


def page(results: Results, count: int, folder: Path) -> None:
    """Writes page.md, page.html and the figures."""
    from jinja2 import Environment, StrictUndefined

    shown = tables(results)
    content: dict[str, Any] = {
        "about": ABOUT,
        "date": datetime.date.today().isoformat(),
        "versions": ", ".join([f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in ("jax", "numpy"))]),
        "done": len(results.every),
        "count": count,
        "tables": [*shown[:-2], *beside(folder.parent), *shown[-2:]],  # how old results are, and what is missing, come last
        "figures": drawn(results, folder),
    }
    markdown = Environment(undefined=StrictUndefined)
    html = Environment(undefined=StrictUndefined, autoescape=True)
    write(folder / "page.md", markdown.from_string(MARKDOWN).render(content) + "\n")
    write(folder / "page.html", html.from_string(HTML).render(content))
