"""Compute the reference vectors with Hugging Face transformers, or check those that are here. See README.md.

Everything runs on the CPU, in f32, with the plain ("eager") attention and experts of the library. What the vectors
promise of the checkpoints (clear routing decisions, idle experts, values that are clipped) is checked on the way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from fixtures.families import FAMILIES
from fixtures.families import reference_path as family_reference_path
from fixtures.olmoe import (
    EXPERTS,
    IDLE_EXPERTS,
    LAYERS,
    SINGLE_EXPERTS,
    VARIANTS,
    VariantName,
    digest,
    token_ids,
    weights,
    write_checkpoint,
)
from fixtures.reference import (
    GREEDY_PROMPT,
    GREEDY_TOKENS,
    PROMPT_LENGTHS,
    Prompt,
    Reference,
    kept_positions,
    reference_path,
)
from reference.family_model import compute_family
from reference.hooked import MIN_SCORE_GAP, Array, UnclearError, greedy, require, versions

TOLERANCE = 1e-4
"""Greatest difference of a logit or weight from the kept one under `--check`; other f32 code is 2e-5 off."""


class Model:
    """A checkpoint in transformers, with what its layers compute."""

    def __init__(self, folder: Path, variant: VariantName):
        self._variant = variant
        self._model = transformers.OlmoeForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._outputs: dict[str, Any] = {}
        for name, module in self._model.named_modules():
            if name.endswith((".mlp.gate", ".q_norm", ".k_norm", ".v_proj")):
                module.register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            # Cloned: what follows clips its input in place.
            tensors = output if isinstance(output, tuple) else (output,)
            self._outputs[name] = [tensor.detach().clone().numpy() for tensor in tensors]

        return hook

    def logits(self, tokens: Array) -> Array:
        """Logits of every position, `[T, V]` f32, for `[T]` token ids."""
        with torch.inference_mode():
            output = self._model(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
        self._check_routing()
        logits: Array = output.logits[0].numpy()
        return logits

    def _router_outputs(self) -> list[list[Array]]:
        return [self._outputs[f"model.layers.{layer}.mlp.gate"] for layer in range(LAYERS)]

    def _check_routing(self) -> None:
        top_k = VARIANTS[self._variant].top_k
        for layer, (scores, _, _) in enumerate(self._router_outputs()):
            best = np.sort(scores, axis=-1)[:, ::-1][:, : top_k + 1]
            gap = float(-np.diff(best, axis=-1).max())
            require(gap >= MIN_SCORE_GAP, f"{self._variant}: scores of layer {layer} only {gap:.1e} apart")

    def prompt(self, tokens: Array) -> Prompt:
        """Run a prompt and keep what the reference keeps of it."""
        positions = kept_positions(len(tokens))
        logits = self.logits(tokens)[positions]
        outputs = self._router_outputs()
        return Prompt(
            tokens=tokens,
            experts=np.stack([ids for _, _, ids in outputs]).astype(np.int16),
            weights=np.stack([routing_weights for _, routing_weights, _ in outputs]),
            positions=positions,
            logits=logits,
        )

    def check_clipping(self, bound: float) -> None:
        """Assure that the last prompt had queries, keys and values to clip in every layer."""
        for layer in range(LAYERS):
            for name in ("q_norm", "k_norm", "v_proj"):
                (values,) = self._outputs[f"model.layers.{layer}.self_attn.{name}"]
                share = float((np.abs(values) > bound).mean())
                require(0.05 < share < 0.95, f"{self._variant}: {share:.0%} of {name} in layer {layer} are clipped")


def compute(variant: VariantName) -> Reference:
    """All vectors of a variant."""
    with tempfile.TemporaryDirectory() as folder:
        model = Model(write_checkpoint(Path(folder), variant), variant)
    prompts = {length: model.prompt(token_ids(f"{variant}/{length}", length)) for length in PROMPT_LENGTHS}
    _check_experts(variant, prompts[max(PROMPT_LENGTHS)].experts)
    if (bound := VARIANTS[variant].clip_qkv) is not None:
        model.check_clipping(bound)
    return Reference(
        prompts=prompts,
        greedy=greedy(model.logits, prompts[GREEDY_PROMPT].tokens, GREEDY_TOKENS),
        checkpoint=digest(weights(variant)),
        versions=versions(),
    )


def _check_experts(variant: VariantName, experts: npt.NDArray[np.int16]) -> None:
    """Assure that a long prompt uses the experts the variant is meant to use, in every layer."""
    for layer, chosen in enumerate(experts):
        found = set(np.unique(chosen).tolist())
        expected = {
            "free": set(range(EXPERTS)),
            "idle": set(range(EXPERTS)) - set(IDLE_EXPERTS),
            "single": {SINGLE_EXPERTS[layer]},
        }[VARIANTS[variant].routing]
        require(found == expected, f"{variant}: layer {layer} uses experts {sorted(found)}, not {sorted(expected)}")


def differences(found: Reference, kept: Reference) -> list[str]:
    """What differs between new vectors and those kept, by name."""
    problems = [name for name in ("checkpoint",) if getattr(found, name) != getattr(kept, name)]
    if not np.array_equal(found.greedy, kept.greedy):
        problems.append("greedy")
    for length, prompt in kept.prompts.items():
        for name in Prompt.__dataclass_fields__:
            new, old = getattr(found.prompts[length], name), getattr(prompt, name)
            tolerance = TOLERANCE if name in ("weights", "logits") else 0
            if new.dtype != old.dtype or new.shape != old.shape or not np.allclose(new, old, rtol=0, atol=tolerance):
                problems.append(f"{name}_{length}")
    return problems


def main() -> int:
    """Write or check vectors; exit 1 when a check finds a difference or a checkpoint will not do."""
    parser = argparse.ArgumentParser(description="Compute the reference vectors with Hugging Face transformers.")
    parser.add_argument("--check", action="store_true", help="compare with the vectors that are here; write nothing")
    parser.add_argument("names", nargs="*", help="OLMoE variants and families; all when none is given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = {variant: (partial(compute, variant), reference_path(variant)) for variant in VARIANTS}
    families = {name: (partial(compute_family, name), family_reference_path(name)) for name in FAMILIES}
    status = 0
    for name in options.names or [*jobs, *families]:
        job, path = (jobs | families)[name]
        try:
            found = job()
        except UnclearError as error:
            sys.stderr.write(f"generate.py: error: {name}: {error}\n")
            return 1
        if options.check:
            problems = differences(found, Reference.load(path))
            status = 1 if problems else status
            sys.stdout.write(f"{path.name}: {', '.join(problems) + ' differ' if problems else 'equal'}\n")
        else:
            found.save(path)
            last = found.prompts[max(found.prompts)].logits
            sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes, logits of deviation {last.std():.2f}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
