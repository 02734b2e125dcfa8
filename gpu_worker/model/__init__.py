"""The model in torch: weights, layers, sampler. Knows no requests."""
