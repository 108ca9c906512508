"""The rules of schedules, streams and programs."""
