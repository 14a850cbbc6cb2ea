"""Measured times of operators: profiles of devices, and the database that stores them."""
