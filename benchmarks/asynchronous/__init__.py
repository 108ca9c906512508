"""What streams without a flush cost in loss, and gain in time."""
