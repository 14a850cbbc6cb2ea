"""The devices of a plan, and the shardings of its arguments and results on them."""
