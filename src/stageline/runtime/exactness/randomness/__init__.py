"""Reproducible randomness: a layer draws by seed, step, micro-batch and its own name alone."""
