"""Which progress bar is drawn: tqdm's for where this runs, in a notebook one of its widgets.

A notebook without ipywidgets has none, and tqdm says so with a warning of several lines before anything else is seen;
a bar of text, or no bar, does as well.

Before: nothing.  After: source.py, engine/parts.py, engine/progress.py.
"""

from __future__ import annotations

import warnings


def bar_class() -> type:
    """The class, imported when it is first wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm
    return tqdm
