"""The search for the best order of F, I and W: a problem, ways to make orders, small moves."""
