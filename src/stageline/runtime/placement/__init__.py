"""Where layers, weights and devices are."""
