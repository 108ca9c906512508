"""The user's model as a sequence of layers with named values."""
