// The page of runs.
