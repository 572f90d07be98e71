"""HTTP: OpenAI's protocol in front of an engine.

A protocol file turns JSON into a Request's parameters and Outputs into JSON; it is handed an engine and never builds
one, and it imports no torch, so that all of it is tested in process with a fake engine.
"""
