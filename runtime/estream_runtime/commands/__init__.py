"""The verbs of `estream-run`, one module each."""
