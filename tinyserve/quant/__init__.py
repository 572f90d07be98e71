"""How the numbers of a linear layer are kept, and multiplied: one file per format.

A layer never asks what its weights look like. It owns a WeightFormat (format.py), which makes the parameters, fills
them from a checkpoint, packs them, and multiplies by them. `Plain` (plain.py) is ordinary dense numbers.

Before: kernels/.  After: layers/linear.py.
"""
