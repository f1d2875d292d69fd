"""pdserve_decode_node."""
