"""Rules applied to captured programs."""
