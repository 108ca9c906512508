"""What the user brings, as a sequence of layers with named values."""
