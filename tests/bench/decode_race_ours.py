"""Take a random prompt in, then decode the tokens that follow: what `decode_race.py` times of ours.

    python tests/bench/decode_race_ours.py PACKAGE PROMPT TOKENS PASSES OPTIONS

That happens PASSES times; the first finds an empty arena. OPTIONS are those of a session, as JSON. Prints a list of
JSON with the figures of each pass. A file of its own, so that it imports what a program that runs a package needs and
nothing else.
"""

import json
import os
import random
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `estream-run` does

from estream_loader import open_package
from estream_runtime import Session

path, prompt, tokens, passes, options = sys.argv[1:]
with open_package(path) as package, Session(package, **json.loads(options)) as session:
    ids = random.Random(0).choices(range(package.manifest.model.vocabulary), k=int(prompt))
    found = []
    for _ in range(int(passes)):
        generation = session.generate(ids, int(tokens) + 1)
        made = list(generation)
        stats = generation.stats
        assert len(made) == int(tokens) + 1
        assert stats.decoding is not None
        found.append(
            {
                "tokens_per_s": stats.decode_tokens_per_s,
                "prompt_s": stats.ttft_s,
                "bytes_per_token": stats.decoding.bytes_read / stats.decoding.tokens,
                "hit_rate": stats.decoding.hit_rate,
                "token_ids": made,
            }
        )
print(json.dumps(found))
