"""What unity does, measured beside what it is compared to."""
