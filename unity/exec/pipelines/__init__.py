"""Pipeline schedules as they run."""
