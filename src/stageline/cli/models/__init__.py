"""Commands on a user's model, which a function of theirs makes."""
