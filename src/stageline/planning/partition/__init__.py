"""Cut layers into stages, and compute the time and memory of the stages."""
