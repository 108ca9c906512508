// The page of plans.
