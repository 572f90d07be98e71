"""The sampler against the meaning of each parameter, spelled out in plain Python."""
