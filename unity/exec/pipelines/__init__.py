"""Pipeline schedules on devices: GPipe, 1F1B, and the loop of half ticks that 1F1B and 2BW share."""
