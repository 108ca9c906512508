"""Profile a model, describe a cluster, and find the fastest plan that fits in its memory."""
