"""The checkpoints of `fixtures.families` in transformers, and the checks that their vectors mean something."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from fixtures.checkpoints.gpt_oss import decoded
from fixtures.families import (
    GREEDY_PROMPT,
    GREEDY_TOKENS,
    PROMPT_LENGTHS,
    config,
    kept_positions,
    prompt,
    weights,
    write_checkpoint,
)
from fixtures.olmoe import digest
from fixtures.reference import Prompt, Reference
from reference.hooked import MIN_SCORE_GAP, Array, greedy, require, versions

ROUTERS = (".mlp.gate", ".mlp.router", ".block_sparse_moe.router", ".feed_forward.gate")
MIN_SHARE = 0.03
"""Least share of a long prompt's decisions that a rule must change to count as tested."""


class FamilyModel:
    """A checkpoint in transformers; runs keep what its routers say."""

    def __init__(self, folder: Path, name: str):
        self._config = config(name)
        self._model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        require(not any(loaded.values()), f"not every tensor has its place: {loaded}")
        self._model.eval()
        self._routes: list[tuple[Array, Array, Array, Array | None]] = []
        self._gate_ups: list[Array] = []
        for module_name, module in self._model.named_modules():
            if module_name.endswith(ROUTERS):
                module.register_forward_hook(self._keep)
            if self._config["model_type"] == "gpt_oss" and module_name.endswith(".mlp.experts"):
                self._watch_gate_ups(module, module_name, weights(name))

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        scores, routing_weights, ids = (tensor.detach().numpy() for tensor in output)
        biases = [tensor for key, tensor in module.state_dict().items() if key.endswith("e_score_correction_bias")]
        biases += inputs[1:]  # LFM2 hands it in
        self._routes.append((scores, routing_weights, ids, biases[0].numpy().ravel() if biases else None))

    def _watch_gate_ups(self, module: Any, module_name: str, tensors: dict[str, Array]) -> None:
        """Keeps what the experts of GPT-OSS clamp, and assures that its weights are those that MXFP4 stands for."""
        for part in ("gate_up_proj", "down_proj"):
            blocks, scales = (tensors[f"{module_name}.{part}_{what}"] for what in ("blocks", "scales"))
            loaded = getattr(module, part).detach().numpy().transpose(0, 2, 1)
            require(np.array_equal(loaded, decoded(blocks, scales)), f"{part} of {module_name} is decoded otherwise")
        apply_gate = module._apply_gate

        def watched(gate_up: Any) -> Any:
            self._gate_ups.append(gate_up.detach().numpy().copy())
            return apply_gate(gate_up)

        module._apply_gate = watched

    def logits(self, tokens: Array) -> Array:
        """Logits of every position, `[T, V]` f32, for `[T]` token ids."""
        self._routes.clear()
        self._gate_ups.clear()
        with torch.inference_mode():
            output = self._model(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
        for scores, _, ids, bias in self._routes:
            self._check_clear(scores, ids, bias)
        logits: Array = output.logits[0].numpy()
        return logits

    def _check_clear(self, scores: Array, ids: Array, bias: Array | None) -> None:
        """Assures that we know what the choice is made of, and that it is clear."""
        top_k = ids.shape[1]
        selection = selection_scores(self._config, scores, bias)
        order = np.argsort(-selection, axis=1, kind="stable")[:, :top_k]
        require(np.array_equal(np.sort(order), np.sort(ids)), "experts are not chosen by the scores we know")
        best = -np.sort(-selection, axis=1)[:, : top_k + 1]
        gap = float(-np.diff(best, axis=1).max())
        require(gap >= MIN_SCORE_GAP, f"scores only {gap:.1e} apart")
        if (limit := self._config.get("router_jitter_noise")) is not None:
            check_mixer_is_clear(scores, order, limit)

    def prompt(self, tokens: Array) -> Prompt:
        """Run a prompt and keep what the reference keeps of it."""
        positions = kept_positions(len(tokens))
        logits = self.logits(tokens)[positions]
        experts, chosen_weights = [], []
        for scores, routing_weights, ids, bias in self._routes:
            selection = np.take_along_axis(selection_scores(self._config, scores, bias), ids, axis=1)
            order = np.argsort(-selection, axis=1, kind="stable")
            experts.append(np.take_along_axis(ids, order, axis=1).astype(np.int16))
            chosen_weights.append(np.take_along_axis(routing_weights, order, axis=1))
        return Prompt(
            tokens=tokens,
            experts=np.stack(experts),
            weights=np.stack(chosen_weights),
            positions=positions,
            logits=logits,
        )

    def check_rules(self) -> None:
        """Assures that the last prompt chose every expert and that each rule of its family made a difference."""
        for scores, routing_weights, ids, bias in self._routes:
            used = np.unique(ids)
            require(len(used) == scores.shape[1], f"only experts {used.tolist()} are used")
            selection = selection_scores(self._config, scores, bias)
            if bias is not None:
                unbiased = selection_scores(self._config, scores, np.zeros_like(bias))
                _require_share("the selection bias", _changed(selection, unbiased, ids.shape[1]))
            if grouped(self._config):
                free = self._config | {"topk_group": self._config["n_group"]}
                ungrouped = selection_scores(free, scores, bias)
                _require_share("groups", _changed(selection, ungrouped, ids.shape[1]))
            if self._config["model_type"] == "phimoe":
                for choice in range(2):
                    _require_share("the mixer's tolerance", float((routing_weights[:, choice] < 1).mean()))
        if self._gate_ups:
            limit, gate_ups = self._config["swiglu_limit"], np.concatenate(self._gate_ups)
            gate, up = gate_ups[:, ::2], gate_ups[:, 1::2]
            for name, clamped in (("gates above", gate > limit), ("ups above", up > limit), ("ups below", up < -limit)):
                _require_share(f"the limit on {name}", float(clamped.any(axis=1).mean()))
            _require_share("no limit on gates below", float((gate < -limit).any(axis=1).mean()))


def grouped(config: dict[str, Any]) -> bool:
    """Whether experts are chosen within groups."""
    return config["model_type"] == "deepseek_v3" or config.get("topk_method") == "group_limited_greedy"


def selection_scores(config: dict[str, Any], scores: Array, bias: Array | None) -> Array:
    """What the largest are chosen of, `[T, E]`, from the router's scores: in the same order, if not the same values."""
    if config["model_type"] in ("deepseek_v3", "lfm2_moe"):
        scores = 1 / (1 + np.exp(-scores))
    elif config["model_type"] == "ernie4_5_moe":
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores = scores / scores.sum(axis=1, keepdims=True)
    if bias is not None:
        scores = scores + bias
    return _within_groups(config, scores) if grouped(config) else scores


def _within_groups(config: dict[str, Any], scores: Array) -> Array:
    """Scores with all but those of the best groups at minus infinity."""
    groups = scores.reshape(len(scores), config["n_group"], -1)
    summed = 2 if config["model_type"] == "deepseek_v3" else 1
    group_scores = np.sort(groups, axis=2)[:, :, -summed:].sum(axis=2)
    order = np.argsort(-group_scores, axis=1, kind="stable")
    if config["topk_group"] < config["n_group"]:
        ranked = np.take_along_axis(group_scores, order, axis=1)
        gap = float((ranked[:, config["topk_group"] - 1] - ranked[:, config["topk_group"]]).min())
        require(gap >= MIN_SCORE_GAP, f"groups only {gap:.1e} apart")
    ranks = np.argsort(order, axis=1)
    masked: Array = np.where((ranks < config["topk_group"])[..., None], groups, -np.inf).reshape(scores.shape)
    return masked


def check_mixer_is_clear(scores: Array, order: Array, noise: float) -> None:
    """Assures that no expert is near the edge of Phi-MoE's tolerance, for the first choice and the second."""
    for choice in range(2):
        best = np.take_along_axis(scores, order[:, choice : choice + 1], axis=1)
        distance = (best - scores) / np.maximum(np.abs(scores), best)
        gap = float(np.abs(distance - 2 * noise).min())
        require(gap >= MIN_SCORE_GAP / 10, f"an expert only {gap:.1e} from the edge of the tolerance")


def _changed(selection: Array, other: Array, top_k: int) -> float:
    """Share of tokens whose experts the two scores choose differently."""
    chosen = (np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :top_k]) for scores in (selection, other))
    return float((next(chosen) != next(chosen)).any(axis=1).mean())


def _require_share(what: str, share: float) -> None:
    require(share >= MIN_SHARE, f"{what} matters for {share:.0%} only")


def compute_family(name: str) -> Reference:
    """All vectors of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model = FamilyModel(write_checkpoint(Path(folder), name), name)
    prompts = {length: model.prompt(prompt(name, length)) for length in PROMPT_LENGTHS}
    model.check_rules()
    return Reference(
        prompts=prompts,
        greedy=greedy(model.logits, prompts[GREEDY_PROMPT].tokens, GREEDY_TOKENS),
        checkpoint=digest(weights(name)),
        versions=versions(),
    )
