"""Stageline beside its peers, in one job and in turns: python -m benchmarks.compare --help."""
