"""pdserve_text."""
