"""Formats of a difference: text, Markdown, HTML, JSON, DOT."""
