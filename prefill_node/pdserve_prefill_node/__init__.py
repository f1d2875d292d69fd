"""pdserve_prefill_node."""
