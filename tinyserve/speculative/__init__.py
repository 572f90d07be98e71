"""Guessing tokens ahead, so that one forward pass can confirm several of them.

A drafter only proposes; which proposals are right is decided by the model itself, so the answer never changes. Nothing
here knows the scheduler, which asks for proposals and books what was accepted.
"""
