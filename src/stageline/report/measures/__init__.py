"""Measures of a timeline: idle time, memory, transfers."""
