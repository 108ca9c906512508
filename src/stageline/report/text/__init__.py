"""A timeline as text."""
