"""The processes backend: one rank in each process, messages over process groups."""
