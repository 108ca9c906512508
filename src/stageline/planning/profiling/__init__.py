"""Measure or estimate the time and memory of each layer of a model."""
