"""Open an `.emoe` package and page its experts from flash into one fixed-size arena.

from estream_loader import open_package

with open_package("model.emoe") as package:
    package.manifest.model.hidden
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from estream_loader.keys import read_public_key
    from estream_loader.package import Integrity, Package, open_package
    from estream_loader.trust import SignaturePolicy

__all__ = ["Integrity", "Package", "SignaturePolicy", "open_package", "read_public_key"]

_MODULES = {
    "Integrity": "package",
    "Package": "package",
    "SignaturePolicy": "trust",
    "open_package": "package",
    "read_public_key": "keys",
}


def __getattr__(name: str) -> object:
    """Import what is asked for, so that a command line can say how numpy is to start before it does."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
