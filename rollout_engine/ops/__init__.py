"""Elementwise steps of a forward pass: one kernel each on a GPU, plain torch elsewhere."""
