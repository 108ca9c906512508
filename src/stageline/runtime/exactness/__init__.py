"""What makes a pipelined step equal, bit for bit, to a plain loop."""
