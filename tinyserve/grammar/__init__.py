"""Answers that must satisfy a grammar: what may come next, token by token.

compile.py makes grammars of what was asked for, off the loop; matcher.py keeps the place of one answer in its grammar;
thought.py lets a thought go before it; mask.py computes the masks of a step, which the sampler applies.
"""
