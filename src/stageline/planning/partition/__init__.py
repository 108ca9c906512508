"""Cut layers into stages."""
