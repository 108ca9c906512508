"""Backends: where ranks run, and how messages travel between them."""
