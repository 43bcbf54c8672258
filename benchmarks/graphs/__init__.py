"""Analysis of traced graphs: placement, kernels, crossings."""
