"""From a name that the user typed to filled weights: find the files (source), read them (gguf, safetensors), match
their names to the model's (table), fill the model and refuse what does not fit (load).

Before: config.py (which model).  After: models/ (what is filled).
"""
