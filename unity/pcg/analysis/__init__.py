"""Facts of a program that training depends on: gradients, residuals, rematerialization."""
