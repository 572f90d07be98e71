"""The front of the machine: text comes in, the loop runs steps, text goes out as it is made.

Read engine.py first: its `run` is the only loop in tinyserve. intake.py turns what a caller wrote into requests of
token ids, streams.py turns updates of token ids back into text for a reader that may be slow, fanout.py and beam.py
make several requests of one, parts.py and assemble.py build everything, llm.py is the same for people without asyncio.

Before: scheduling/, runner/, text/.  After: server/, which gives this a network address.
"""
