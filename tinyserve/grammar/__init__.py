"""Answers that must satisfy a grammar: what may come next, token by token.

asked.py puts what was asked for into the library's language: schema.py what JSON schemas say, tags.py parts between
marks; sayings.py puts what the library says of it into ours. trial.py has that done, and tried, in a process of its
own, and compile.py compiles for itself what has passed, off the loop. matcher.py keeps the place of one answer in its
grammar; thought.py lets a thought go before it; mask.py computes the masks of a step, which the sampler applies, or
has them from processes that follow the answers: replicas.py says to them what comes, over a board (board.py), crew.py
starts them, and mask_worker.py is what they do.
"""
