"""The LSTM that scores a step, evaluated in numpy.

It gives N_OUTPUTS scores: for the stages, accumulation, partitioned activations and tensor parallelism.
Maintainers train it with torch (benchmarks/fingerprint/stage_train.py); the daemon never loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ....store.records import Stage
from ..labels import ACCUMULATIONS, N_OUTPUTS, POSSIBLE, STAGES, Shown
from ..steps.anatomy import MIN_IN_A_ROW, REDUCE, ROOTED, SCATTER, Floats, Step
from . import arrays
from .features import FEATURES_VERSION, N_FRAME, N_SUMMARY, frames, micro_steps_shown, rounds, summary

Arrays = Mapping[str, npt.NDArray[np.float64]]

KIND: Final = "lstm"
"""The kind of encoder in stored weights."""
MIN_CONFIDENCE: Final = 0.5
"""Least probability of a stage that is claimed."""
MAX_DEVIATION: Final = 6.0
SENT_TWICE: Final = 1.5
"""Least ratio of bytes sent to bytes returned if gradients are sent in two micro-steps, in equal or double size."""
PASSES: Final = 3
"""Forward, backward, and recomputation between them."""


class LstmEncoder:
    """One LSTM layer over the frames, its last state beside the summary, one hidden layer."""

    def __init__(self, weights: Arrays) -> None:
        n, n_hidden = (weights[name].size if name in weights else 0 for name in ("bias", "hidden_bias"))
        n //= 4
        shapes = {
            "input": (4 * n, N_FRAME), "recurrent": (4 * n, n), "bias": (4 * n,), "mean": (N_SUMMARY,),
            "scale": (N_SUMMARY,), "hidden": (n_hidden, n + N_SUMMARY), "hidden_bias": (n_hidden,),
            "output": (N_OUTPUTS, n_hidden), "output_bias": (N_OUTPUTS,),
        }  # fmt: skip
        found = {name: array.shape for name, array in weights.items()}
        if found != shapes:
            raise ValueError(f"arrays have shapes {found}, not {shapes}")
        self._n = n
        self.weights = weights
        self._recurrent = np.ascontiguousarray(weights["recurrent"])

    def scores(self, step: Step) -> Floats:
        """Unnormalised log probabilities, shape [N_OUTPUTS]."""
        weights, n = self.weights, self._n
        inputs = frames(step) @ weights["input"].T + weights["bias"]
        state, memory = np.zeros(n), np.zeros(n)
        for row in inputs:
            gates = row + self._recurrent @ state
            # torch's order: input, forget, cell, output.
            opened = 0.5 + 0.5 * np.tanh(0.5 * gates)
            memory = opened[n : 2 * n] * memory + opened[:n] * np.tanh(gates[2 * n : 3 * n])
            state = opened[3 * n :] * np.tanh(memory)
        known = standardised(summary(step), weights["mean"], weights["scale"])
        hidden = np.tanh(weights["hidden"] @ np.concatenate([state, known]) + weights["hidden_bias"])
        result: Floats = weights["output"] @ hidden + weights["output_bias"]
        return result

    def to_bytes(self) -> bytes:
        """The stored form of the weights."""
        return arrays.to_bytes(KIND, FEATURES_VERSION, self.weights)

    @classmethod
    def from_bytes(cls, blob: bytes) -> LstmEncoder:
        """The encoder with the weights in `blob`; ValueError if they are damaged, or do not fit together."""
        kind, weights = arrays.from_bytes(blob, FEATURES_VERSION)
        if kind != KIND:
            raise ValueError(f"there is no encoder {kind!r}")
        return cls(weights)


def standardised(features: Floats, mean: Floats, scale: Floats) -> Floats:
    """`features` [..., n] less their `mean` in training, times `scale` (1 / deviation), within MAX_DEVIATION."""
    result: Floats = np.clip((features - mean) * scale, -MAX_DEVIATION, MAX_DEVIATION)
    return result


def decide(scores: Floats, step: Step) -> Shown:
    """The most probable kind that `step` can show; a stage below MIN_CONFIDENCE is unknown."""
    chances = np.where(_can_be(step), np.exp(_PARTS @ _log_chances(_separated(scores, step))), 0.0)
    by_stage = chances @ _OF_STAGE
    best = int(by_stage.argmax())
    if by_stage[best] < MIN_CONFIDENCE * by_stage.sum():
        best = STAGES.index(Stage.unknown)
    return POSSIBLE[int(np.where(_OF_STAGE[:, best], chances, -1.0).argmax())]


def _can_be(step: Step) -> list[bool]:
    """Which of POSSIBLE the step may be.

    Tensor parallelism sums activations, P_a gathers the summed sizes, and P_a's micro-steps can be counted. ZeRO-3
    gathers in every micro-step, so a flag once per step shows the number of micro-steps. Without a call once per step,
    a round may be one micro-step. If over two thirds of the bytes sent are broadcast, gradients were sent once.
    Gradients that are sent in every micro-step have the same sizes each time.
    """
    n_micro_steps = micro_steps_shown(step)
    sums = step.has_pairs or (bool((step.roles == REDUCE).any()) and _sums_in_forward(step))
    returned = int(step.rest.bytes[step.rest.roles == ROOTED].sum())
    sent = int(step.rest.bytes[_is_sent(step.rest)].sum())
    has_mark = returned > 0 or step.has_mark
    sent_once = 0 < sent < SENT_TWICE * returned
    sends_again = _sends_again(step)

    def can_be(one: Shown) -> bool:
        if one.stage is Stage.zero3 and one.accumulation is None and step.n_flags:
            return False
        if one.accumulation and not sends_again and one.stage is Stage.zero2:
            return False
        if one.partitioned_activations:
            if one.stage is Stage.unknown or not n_micro_steps:
                return n_micro_steps > 0
            if n_micro_steps > 1:
                return one.accumulation is True
            return not step.n_flags if one.accumulation is None else has_mark and not one.accumulation
        if one.accumulation and not sends_again and one.stage is Stage.ddp:
            return False
        if one.stage is Stage.zero1 and one.accumulation and sent_once:
            return False
        return sums or not one.tensor_parallel

    return [can_be(one) for one in POSSIBLE]


def _separated(scores: Floats, step: Step) -> Floats:
    """Scores that separate ZeRO-1 and ZeRO-2 only if the calls do.

    ZeRO-2 that sends its gradients once looks like ZeRO-1. With visible micro-steps, ZeRO-2 sends in each.
    """
    scores = scores.copy()
    sends_again = _sends_again(step)
    if not sends_again:
        scores[_ZERO1_OR_2] = np.logaddexp(scores[_ZERO1_OR_2], scores[_ZERO2])
    if micro_steps_shown(step) > 1:
        named = _ZERO2 if sends_again else _ZERO1
        scores[named] = np.logaddexp(scores[named], scores[_ZERO1_OR_2])
    return scores


def _sums_in_forward(step: Step) -> bool:
    """Whether enough possible activations are consecutive.

    At least a third of activations is summed in forward, where no gradient is sent.
    """
    activations = step.activations
    if activations is None or not (activations.roles == REDUCE).all():
        return True
    of_size = (step.roles == REDUCE) & (step.bytes == activations.bytes[0])
    others = np.flatnonzero(_is_sent(step) & ~of_size)
    if not len(others):
        return True
    rows = np.bincount(np.searchsorted(others, np.flatnonzero(of_size)) % len(others))
    return bool(PASSES * rows[rows >= MIN_IN_A_ROW].sum() >= rows.sum())


def _is_sent(step: Step) -> npt.NDArray[np.bool_]:
    sent: npt.NDArray[np.bool_] = (step.roles == SCATTER) | (step.roles == REDUCE)
    return sent


def _sends_again(step: Step) -> bool:
    """Whether gradients may be sent several times, with the same sizes each time."""
    sent = step.rest.bytes[_is_sent(step.rest)]
    return not len(sent) or rounds(sent) > 1


def _log_chances(scores: Floats) -> Floats:
    """Log probability of every answer to every question, in the order of _ANSWERS."""
    n_stages, n_accumulations = len(STAGES), len(ACCUMULATIONS)
    stages, accumulations, flags = np.split(scores, [n_stages, n_stages + n_accumulations])
    choices = [stages, accumulations, *(np.array([0.0, flag]) for flag in flags)]
    return np.concatenate([one - np.logaddexp.reduce(one) for one in choices])


def _parts(shown: Shown) -> list[bool]:
    given = (shown.stage, shown.accumulation, shown.partitioned_activations, shown.tensor_parallel)
    return [value is answer for values, answer in zip(_ANSWERS, given, strict=True) for value in values]


_ZERO1: Final = STAGES.index(Stage.zero1)
_ZERO2: Final = STAGES.index(Stage.zero2)
_ZERO1_OR_2: Final = STAGES.index(Stage.zero1_or_2)
_ANSWERS: Final = (STAGES, ACCUMULATIONS, (False, True), (False, True))
_PARTS: Final = np.array([_parts(one) for one in POSSIBLE], np.float64)
_OF_STAGE: Final = np.array([[one.stage is stage for stage in STAGES] for one in POSSIBLE])
