"""The requests of the page of plans: profiles, clusters, and all ways to train that were tried."""
