"""Stageline: pipeline-parallel training, with every schedule as data."""
