"""Measurements of operators, collectives and whole plans on the devices at hand."""
