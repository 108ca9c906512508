"""Messages between devices over ordered channels, one for each direction between two ranks."""
