"""What the programs change in the import of TensorFlow and Keras."""

import sys

# Imported by Keras 3.15 and TensorFlow 2.21 where they are installed, for functions
# that no program calls; a third of the time of the import.
OPTIONAL = ("matplotlib", "pandas", "scipy", "sklearn")


class ImportHook:
    """A finder for `sys.meta_path` that finds nothing: it refuses modules of TensorFlow
    and Keras the packages `OPTIONAL`, as if they were not installed. Functions that
    import them when they are called get them, and so does everybody else.
    """

    def find_spec(self, name, path=None, target=None):
        if name in OPTIONAL:
            frame = sys._getframe(1)
            while "importlib" in frame.f_globals.get("__name__", ""):
                frame = frame.f_back
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            is_import = frame.f_code.co_name == "<module>"
            if is_import and package in ("keras", "tensorflow"):
                raise ModuleNotFoundError(f"{name} is not needed", name=name)
        return None
