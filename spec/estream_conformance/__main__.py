"""`python -m estream_conformance` is `estream-conformance`."""

from estream_conformance.cli import main

main()
