"""towers: train image classifiers on every GPU of a machine, one tower per GPU.

Importing the package imports neither TensorFlow nor Keras; it only settles, while there
is still time, which backend Keras will take and how much TensorFlow says.
"""

import contextlib
import os
import re
import sys
import tempfile

__version__ = "0.1.0"

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_CHATTER = re.compile(
    r"WARNING: All log messages before absl|[IWE]0000 |To enable the "
)


@contextlib.contextmanager
def quiet_imports():
    """Imports TensorFlow inside without the lines that it prints before it can be told
    not to (it logs while its libraries are loaded, before it reads its log level)."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held_back.seek(0)
            for line in held_back.read().decode(errors="replace").splitlines():
                if not _CHATTER.match(line):
                    print(line, file=sys.stderr)
