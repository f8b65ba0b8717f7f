"""Run an `.emoe` package: experts pass through one small arena, results do not depend on its size.

from estream_loader import open_package
from estream_runtime import Session

with open_package("model.emoe") as package, Session(package, arena_bytes=8 << 20) as session:
    for token in session.generate(package.tokenizer.encode("Once").ids, max_new_tokens=32):
        print(package.tokenizer.decode([token]))
"""

from estream_runtime.session import Generation, Prefill, Session
from estream_runtime.stats import Stats

__all__ = ["Generation", "Prefill", "Session", "Stats"]
