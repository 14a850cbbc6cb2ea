"""The meaning of operators and rules on all devices, proofs about them, and the replay of derivations."""
