"""Messages between processes: what they hold, how they are packed, and how they travel."""
