"""Text pictures of timelines."""
