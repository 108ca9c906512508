"""The search for the best order of F, I and W: list scheduling, then local search."""
