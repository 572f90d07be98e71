"""From logits to the next token: every field of a request's sampling parameters, for a batch in which all rows differ.

A step's rows are chosen together, but each row's result depends on its own logits, parameters and history alone. What
no row of the batch asks for costs nothing: a batch of plain greedy rows is one argmax. `params` keeps the numbers on
the device, `transforms` is the ordered list of edits to the logits, `logprobs` reports, and `sampler` puts them in
order over the kernels of `kernels/`.

Before: models/decoder.py (makes the logits), kernels/sample.py.  After: runner/runner.py, which calls `Sampler`.
"""
