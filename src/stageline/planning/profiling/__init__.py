"""Measure or estimate what each layer costs."""
