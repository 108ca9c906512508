"""Search for the fastest plan."""
