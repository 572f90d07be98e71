"""Answers that must satisfy a grammar: what may come next, token by token.

compile.py makes grammars of what was asked for, off the loop, once trial.py has made and tried them in a process of
their own: asked.py puts them into the library's language, schema.py with what it needs those that are JSON schemas,
tags.py those between marks; sayings.py puts what the library says of them into ours. matcher.py keeps the place of one answer in its grammar;
thought.py lets a thought go before it; mask.py computes the masks of a step, which the sampler applies.
"""
