// The page of schedules.
