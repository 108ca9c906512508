"""One stage: its forward, its backward, and what it keeps between them."""
