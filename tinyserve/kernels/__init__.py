"""Every kernel of the engine, one algorithm a file, each below the plain-torch function that says what it computes.

A file reads top to bottom: the formula and what one program does, `<op>_reference` (the specification, the CPU backend
and the test oracle, all three), the Triton kernel, and the launcher `<op>` that checks, allocates and picks block
sizes. Nothing here knows a model, a request or a schedule: tensors in, tensors out.

Before: `device.py`, the machine.  After: `layers/`, which call the launchers with weights, and `sampling/`.
"""
