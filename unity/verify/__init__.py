"""What operators and rules mean, and the proofs: from axioms, by symbolic execution, and through the program that runs."""
