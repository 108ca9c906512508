"""`stageline demo`: a small GPT trained, verified and drawn in about a minute."""
