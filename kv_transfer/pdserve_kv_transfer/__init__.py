"""pdserve_kv_transfer."""
