"""The requests of the page of plans: profiles, clusters, and all options that were tried."""
