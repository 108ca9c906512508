"""Programs, and the lowering of schedules to them: sends, receives, reductions, steps."""
