"""Open an `.emoe` package and page its experts from flash into one fixed-size arena.

from estream_loader import open_package

with open_package("model.emoe") as package:
    package.manifest.model.hidden
"""

from estream_loader.keys import read_public_key
from estream_loader.package import Integrity, Package, open_package
from estream_loader.trust import SignaturePolicy

__all__ = ["Integrity", "Package", "SignaturePolicy", "open_package", "read_public_key"]
