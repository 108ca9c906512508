"""`pipe.verify`: a pipeline compared, bit for bit, with a plain loop."""
