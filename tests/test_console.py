"""Lines on an output that is closed, full, ASCII, or read by nobody."""

import io
import os
import subprocess
import sys
import threading
import time

import pytest
from processes import ROOT, fill

from towers import console

STREAMS = {"stdout": console.line, "stderr": console.error}
both = pytest.mark.parametrize("name,say", STREAMS.items(), ids=STREAMS)


@both
@pytest.mark.row(31)
def test_row_31_a_line_is_one_plain_line_whatever_a_path_holds(monkeypatch, name, say):
    written = io.BytesIO()
    monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding="ascii"))
    say("saved in ré\nb\x1b[31m\udcff")
    assert written.getvalue() == rb"saved in r\xe9\nb\x1b[31m\udcff" + b"\n"


def in_time(call):
    """The result of a call, which does not wait; None where it does."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(30)
    return results[0] if results else None


@both
@pytest.mark.row(12)
def test_row_12_a_line_does_not_wait_for_those_who_read(monkeypatch, name, say):
    """As with `| less`: they get the lines when they read on."""
    monkeypatch.setattr(console, "_PATIENCE_SECS", 0.1)
    reader, writer = os.pipe()
    with open(reader, "rb") as lines, open(writer, "w") as output:
        monkeypatch.setattr(sys, name, output)
        num_bytes = fill(writer)
        returned = in_time(lambda: [say("a"), say("b")])
        lines.read(num_bytes)
        assert returned
        say("c")
        output.close()
        assert lines.read() == b"a\nb\nc\n"


@pytest.mark.parametrize(
    "end,lines",
    [("", b"a\n"), ("errors.end_process('x', errors.ConfigError('b'))", b"a\nx: ")],
)
@pytest.mark.row(12)
def test_row_12_the_end_of_a_process_waits_for_those_who_read(end, lines):
    code = "from towers import console, errors; console._PATIENCE_SECS = 0.1; "
    code += f"console.error('a'); console.line('kept'); {end}"
    reader, writer = os.pipe()
    num_bytes = fill(writer)
    command = [sys.executable, "-c", code]
    streams = {"stdout": subprocess.PIPE, "stderr": writer}
    with subprocess.Popen(command, cwd=ROOT, **streams) as process:
        os.close(writer)
        assert process.stdout.readline() == b"kept\n"
        time.sleep(0.3)  # until no line is printed before the end
        with open(reader, "rb") as file:
            assert file.read()[num_bytes:].startswith(lines)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a full device")
@pytest.mark.parametrize("prints_results,code", [(True, 2), (False, 0)])
@pytest.mark.row(35)
def test_row_35_results_that_are_not_printed_are_an_error(prints_results, code):
    """A training goes on, as with `| head`."""
    program = "from towers import console; from towers.cli import flags\n"
    program += f"PRINTS_RESULTS = {prints_results}\n"
    program += "def main(_): console.line('accuracy 0.5')\nflags.start(main)"
    command = [sys.executable, "-c", program]
    for path, expected in ("/dev/full", code), (os.devnull, 0):
        with open(path, "w") as output:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == expected
        assert ("standard output: cannot be written" in done.stderr) == bool(expected)
