"""Delta simulation: a simulated task graph that is changed a few tasks at a time (FlexFlow, section 5.3)."""
