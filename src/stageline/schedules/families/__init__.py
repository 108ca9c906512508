"""The schedule families, one file each: pure functions from sizes to a `Schedule`."""
