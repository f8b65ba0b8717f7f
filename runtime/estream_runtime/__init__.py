"""Run an `.emoe` package: experts pass through one small arena, results do not depend on its size.

from estream_loader import open_package
from estream_runtime import Session

with open_package("model.emoe") as package, Session(package, arena_bytes=8 << 20) as session:
    for token in session.generate(package.tokenizer.encode("Once").ids, max_new_tokens=32):
        print(package.tokenizer.decode([token]))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from estream_runtime.context import Context
    from estream_runtime.conversation import Answer, Conversation
    from estream_runtime.session import Generation, Prefill, Session
    from estream_runtime.stats import Stats

__all__ = ["Answer", "Context", "Conversation", "Generation", "Prefill", "Session", "Stats"]

_MODULES = {
    "Answer": "conversation",
    "Context": "context",
    "Conversation": "conversation",
    "Generation": "session",
    "Prefill": "session",
    "Session": "session",
    "Stats": "stats",
}


def __getattr__(name: str) -> object:
    """Import what is asked for, so that the command line can say how numpy is to start before it does."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
