"""Quick and quiet imports of TensorFlow and Keras in the programs."""

import contextlib
import gc
import importlib.machinery
import os
import subprocess
import sys

# Keras 3.15 and TensorFlow 2.21 import these for functions that no program calls; they
# take a third of the time of the import.
OPTIONAL = ("matplotlib", "pandas", "scipy", "sklearn")

# Log lines that TensorFlow 2.21 writes before it reads TF_CPP_MIN_LOG_LEVEL.
_CHATTER = (
    "^(WARNING: All log messages before absl|I0000 |To enable the |"
    "[WE]0000 .*(Unable to register cu|omputation placer .*already registered))"
)


class Finder:
    """Finds Keras or TensorFlow, whichever is imported first, for `sys.meta_path`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the module's spec, whose loader runs it in `quick_import`."""
        if name not in ("keras", "tensorflow"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader.exec_module = quick_import()(spec.loader.exec_module)
        return spec


@contextlib.contextmanager
def quick_import():
    """Import inside without chatter, garbage collection and optional packages."""
    sys.meta_path.remove(Finder)
    hidden = [name for name in OPTIONAL if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
                with contextlib.suppress(OSError):  # no standard error, or no grep
                    _filter_stderr(stack)
            yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        gc.enable()
        gc.freeze()  # imports stay until the program ends


def _filter_stderr(stack):
    """Filter descriptor 2 by a process, which outlives an import that aborts."""
    stderr = os.dup(2)
    stack.callback(os.close, stderr)
    command = ["grep", "--line-buffered", "-aEv", _CHATTER]
    grep = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stderr, start_new_session=True
    )
    # A process that was started inside may keep the pipe open.
    stack.enter_context(contextlib.suppress(subprocess.TimeoutExpired))
    stack.callback(grep.wait, 1.0)
    stack.callback(os.dup2, stderr, 2)
    if grep.stdin:
        with grep.stdin as pipe:
            os.dup2(pipe.fileno(), 2)
