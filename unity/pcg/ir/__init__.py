"""Programs and graphs as immutable values, and their JSON and DOT forms."""
