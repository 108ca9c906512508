"""A training loop for those who do not want their own.

data        batches in an order that a run which was stopped finds again
metrics     what is known of the last steps, and the files that it goes to
progress    the same for whoever watches
fit         the loop
"""
