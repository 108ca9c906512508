"""From a model and a memory budget to the fastest plan."""
