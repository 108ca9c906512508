"""SVG pictures of timelines."""
