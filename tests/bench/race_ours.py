"""Open a package, take in a random prompt, say which token comes first, end: what `race.py` times of ours.

    python tests/bench/race_ours.py PACKAGE TOKENS OPTIONS

OPTIONS are those of a session, as JSON. A file of its own, so that it imports what a program that runs a package needs
and nothing else, numpy's random numbers neither.
"""

import json
import os
import random
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `estream-run` does

from estream_loader import open_package
from estream_runtime import Session

path, tokens, options = sys.argv[1:]
with open_package(path) as package, Session(package, **json.loads(options)) as session:
    prompt = random.Random(0).choices(range(package.manifest.model.vocabulary), k=int(tokens))
    result = session.prefill(prompt)
    print(json.dumps({"token": int(result.logits.argmax()), "prompt_s": result.stats.total_s}))
