"""Reproducible Megatron-LM images, and a launcher for training runs in them.

`from launcher import RunFile, Run, build_image, load_matrix`: see `launcher.api`.
"""

__version__ = "0.2.0"

TYPE_CHECKING = False  # as typing has it, whose import takes as long as all else here
if TYPE_CHECKING:
    from launcher.api import LauncherError, Run, RunFile, build_image
    from launcher.images.matrix.matrix_file import load_matrix

__all__ = ["LauncherError", "Run", "RunFile", "build_image", "load_matrix"]


def __getattr__(name: str) -> object:
    """What is imported once it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    from importlib import import_module

    home = "images.matrix.matrix_file" if name == "load_matrix" else "api"
    return getattr(import_module(f"launcher.{home}"), name)
