"""Search for the fastest configuration that fits in memory."""
