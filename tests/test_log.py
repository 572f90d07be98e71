"""cli/log.py: whatever a client sends, it cannot write a line of the log by itself."""

import logging
import subprocess
import sys

import orjson
import pytest

from tinyserve.cli.log import _Json, _Text

EVIL = "x\nINFO 01-01 00:00:00 [serve] all is well\r\x1b[2Jy\u2028z\u202e"


def record(message, *arguments, error=None):
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("tinyserve.x", logging.ERROR, __file__, 1, message, arguments, info)


def test_a_record_is_one_line_of_text():
    """Line ends, terminal escapes and marks that turn the text around are shown as codes: 1 line, all printable."""
    text = _Text().format(record("received %s", EVIL))

    assert text.isprintable() and "x\\nINFO" in text and "\\x1b[2J" in text


def test_a_line_is_written_where_no_file_can_be_opened():
    """asyncio's own "out of system resource" holds a line end; 1 line came out as 40 of a failed log."""
    code = """
import resource, tinyserve.cli.log as log
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # what is open stays open
print(log.printable("no descriptors" + chr(10)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("no descriptors\\n\n", "")


def test_a_traceback_is_indented():
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        lines = _Text().format(record("failed", error=error)).split("\n")

    assert all(line.startswith("  ") for line in lines[1:]) and all(line.isprintable() for line in lines)


@pytest.mark.parametrize("error", [None, ValueError(EVIL)])
def test_a_record_is_one_json_object(error):
    text = _Json().format(record("received %s", EVIL, error=error))

    assert "\n" not in text and orjson.loads(text)["message"] == "received " + EVIL
