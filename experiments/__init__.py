"""GPipe's own experiments at the size of two cores: tables, images and translation."""
