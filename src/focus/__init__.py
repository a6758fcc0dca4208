"""Focus: learned centroids gate the long-range attention of a frozen language model (arXiv 2604.03260).

The names below are loaded on first use, so that reading a config or a result never imports torch.
"""

from importlib import import_module

_HOME = {
    "FocusConfig": "focus.method_config",
    "compose": "focus.adapter",
    "decompose": "focus.adapter",
    "switch": "focus.adapter",
    "save": "focus.adapter",
    "load": "focus.adapter",
}
__all__ = ["FocusConfig", "compose", "decompose", "load", "save", "switch"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str):
    if name == "adapter":
        return import_module("focus.adapter")
    if name not in _HOME:
        raise AttributeError(f"module 'focus' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
