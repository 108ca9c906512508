"""What a timeline looks like: in the terminal, as SVG, as a page, and in Perfetto."""
