"""Simulation of schedules and programs, without torch."""
