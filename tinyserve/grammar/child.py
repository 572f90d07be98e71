"""How a process of Python is begun that computes for this one: anew, with nothing of it but where modules are found.

Before: config.py.  After: trial.py, crew.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ..config import environment_to_start

_PATHS = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "


def start_child(call: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start Python anew, with what this process can import. An interrupt from the terminal is not meant for it.

    Args: call: what it does.   arguments: from sys.argv[2] on.   options: of Popen.
    """
    paths = json.dumps([str(folder) for folder in sys.path])
    command = [sys.executable, "-c", _PATHS + call, paths, *arguments]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment_to_start(), process_group=0, **options)
