"""The page of `inspect --html`: one file that shows a package, and a run of it, in any browser and without a network.

Strings go in and strings come out. Whatever comes from a package or a trace is foreign text, which `markup.element`
escapes; the page forbids itself everything but its own style and script.
"""
