"""pdserve_kernels."""
