"""Regions of `shard_map` in the user's function, read as global programs."""
