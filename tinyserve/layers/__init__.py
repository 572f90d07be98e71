"""The building blocks that model files compose: linear, embedding, norm, rope, attention, mlp.

A block knows its sizes and how to compute; it does not know where its numbers come from (checkpoint/load.py), how they
are kept (quant/), or which model it is part of (models/). It is born without memory: `allocate` gives it parameters in
the right dtype on the right device, `load` fills them. What changes from step to step comes as an argument, the batch.

Before: kernels/, quant/.  After: checkpoint/load.py fills them, models/ composes them.
"""
