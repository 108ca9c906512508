"""GPipe's tables 2 and 3, the parts of a step's time, and other schedules on the same work."""
