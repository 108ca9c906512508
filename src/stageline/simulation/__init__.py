"""Schedules and programs run on paper."""
