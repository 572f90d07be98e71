"""The model families: one short declarative file each, over shared parts.

config.py reads config.json, decoder.py is the frame that all families share (embedding, layers, norm, head),
registry.py finds the file of a family by the architecture that a checkpoint names.

Before: layers/, checkpoint/load.py.  After: runner/ calls forward and logits.
"""
