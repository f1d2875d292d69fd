"""pdserve_cli."""
