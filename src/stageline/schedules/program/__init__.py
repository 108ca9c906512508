"""From schedules to programs: sends, receives, reductions and optimizer steps."""
