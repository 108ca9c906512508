"""A timeline as an SVG picture."""
