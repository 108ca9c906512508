"""A training loop with reports and checkpoints, for those who do not need their own.

data           batches in an order that a restarted run reproduces
run            the steps, checkpoints and resumption of a training run
metrics        reports on the last steps, and the files that they are written to
progress       a progress bar and lines in the terminal
describe_run   configuration and environment, for the record of a run
run_log        what the first process shows, and writes to the run's folder
fit            the loop
"""
