"""pdserve_router."""
