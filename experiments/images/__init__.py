"""Image classification and transfer with AmoebaNet, after GPipe (arXiv 1811.06965, section 4)."""
