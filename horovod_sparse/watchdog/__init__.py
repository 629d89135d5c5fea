"""Ranks that fail, leave or stall are noticed while others wait for them."""
