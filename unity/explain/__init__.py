"""What a plan decided, and why."""
