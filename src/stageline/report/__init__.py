"""Timelines, their measures, and their pictures: text, SVG, HTML and Perfetto traces."""
