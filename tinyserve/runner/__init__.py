"""The runner: from a step in integers to tokens on a device, and back.

It keeps what the device must remember between steps (`slots`), turns a StepInput into the tensors that every layer
reads (`batch`), runs model and sampler over them (`runner`, through `graphs`), and sizes the KV cache (`memory`). It
knows nothing of requests, text or fairness: rows and positions only.

Before: scheduling/ (decides the step).  After: models/decoder.py (the forward), sampling/sampler.py (the choice).
"""
