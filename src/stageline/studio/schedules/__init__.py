"""The requests of the page of schedules: built, simulated, searched, checked and saved."""
