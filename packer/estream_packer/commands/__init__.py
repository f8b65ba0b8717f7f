"""The verbs of `estream-pack`, one module each: the module's name is the verb, its `command` what runs.

The modules import what does the work inside the function, so that `--help` is fast.
"""
