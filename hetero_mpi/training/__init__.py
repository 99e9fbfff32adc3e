"""The SPMD loop: every rank runs its stage's actions, steps its optimizer, and rank 0 leads."""
