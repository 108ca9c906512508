"""Schedules as data: what they are, how they are built, checked, lowered and searched. No torch."""
