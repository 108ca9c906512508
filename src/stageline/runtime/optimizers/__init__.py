"""Optimizers of single stages: steps inside a stream, clipping, versions of weights."""
