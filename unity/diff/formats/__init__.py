"""A difference as text, Markdown, HTML, JSON or DOT."""
