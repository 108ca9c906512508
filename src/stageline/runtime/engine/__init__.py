"""The loop over a program: stages, micro-batches, and a step's results."""
