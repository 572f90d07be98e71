"""The cache of keys and values, in numbered blocks that sequences with an equal beginning share.

Everything here is bookkeeping over integers, torch-free, except storage.py, which owns the tensors that the block ids
index. Reading order: block.py (what a block is called), pool.py (who holds which), groups.py (what each kind of layer
keeps), cache.py (all that the scheduler sees).
"""
