"""Devices that work asynchronously to the host: their streams and events, and a check of them."""
