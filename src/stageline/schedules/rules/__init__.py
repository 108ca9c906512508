"""The rules that schedules, streams and programs are checked against."""
