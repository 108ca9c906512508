"""Describe the devices of a cluster, and measure the links between them."""
