"""Adapters: small additions to the weights that a request chooses by name.

Requests with different adapters run in one batch. The scheduler needs to know only how many can be active at once and
what identity colours the cache; both come through the protocol in adapters.py.
"""
