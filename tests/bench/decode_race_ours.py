"""Take a random prompt in, then random tokens one at a time: what `decode_race.py` times of ours.

    python tests/bench/decode_race_ours.py PACKAGE PROMPT TOKENS PASSES OPTIONS

The tokens that follow are random as in the other programs' benchmarks, and not the likeliest ones, which with random
weights soon repeat themselves. All of that happens PASSES times; the first finds an empty arena. OPTIONS are those of a
session, as JSON. Prints a list of JSON with the figures of each pass.
"""

import json
import os
import random
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `estream-run` does

from estream_loader import open_package
from estream_runtime import Session

path, prompt, tokens, passes, options = sys.argv[1:]
with open_package(path) as package, Session(package, **json.loads(options)) as session:
    rng, decoding = random.Random(0), session.interpreter.decoding
    ids = rng.choices(range(package.manifest.model.vocabulary), k=int(prompt) + int(tokens))
    found = []
    for _ in range(int(passes)):
        context, before = session.new_context(), decoding.stats
        list(session.generate(ids[: int(prompt)], 1, context=context))
        begun = time.perf_counter()
        for end in range(int(prompt), len(ids)):
            list(session.generate(ids[: end + 1], 1, context=context))
        seconds, decoded = time.perf_counter() - begun, decoding.stats - before
        assert decoded.tokens == int(tokens)
        found.append(
            {
                "tokens_per_s": decoded.tokens / seconds,
                "bytes_per_token": decoded.bytes_read / decoded.tokens,
                "hit_rate": decoded.hit_rate,
            }
        )
    print(json.dumps(found))
