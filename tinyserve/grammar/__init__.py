"""Answers that must satisfy a grammar: what may come next, token by token.

A constraint belongs to one sequence. Compiling it may take a while, during which the request waits and others go on.
"""
