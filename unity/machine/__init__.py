"""Machines as data: devices, network levels, presets, measured profiles, prices of collectives."""
