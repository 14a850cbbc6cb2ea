"""Rules over tensors of any rank: their text, their meaning by index functions, and proofs for every rank and size."""
