"""The scales of a model's tensors, forward and backward, with torch alone."""
