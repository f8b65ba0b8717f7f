"""The `.emoe` package format as pure code: records, manifest, model description, weights and rules.

Nothing here reads a file. Functions turn bytes into typed values and back, and judge those values.
`spec/FORMAT.md` is normative; each module names the section it implements.
"""

__version__ = "0.1.0"
