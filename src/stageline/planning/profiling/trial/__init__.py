"""What layers that run alone do not show: a trial as a pipeline, and what follows from it."""
