"""Trains both encoders offline. Imports torch and scikit-learn, so only the training command may load this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zerotune.tuner.fingerprint.corpus.dataset import Sequence, one_step
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder, NgramEncoder, ngrams, standardised
from zerotune.tuner.fingerprint.encoding.features import N_FRAME, N_FRAMES, N_SUMMARY, frames
from zerotune.tuner.fingerprint.labels import ACCUMULATIONS, N_OUTPUTS, STAGES, Shown
from zerotune.tuner.fingerprint.steps.anatomy import TINY, Step

N_HIDDEN: Final = 32
N_DENSE: Final = 128
N_EPOCHS: Final = 25
RATE: Final = 4e-3
CANNOT_TELL: Final = -1
VIEWS: Final = {"recorded": 12, "generated": 4, "hypothetical": 1}
BATCH: Final = 96
SMOOTHING: Final = 0.02
Weights = dict[str, npt.NDArray[np.float64]]


@dataclass
class Examples:
    """Steps as arrays: frames [n, 2 N_FRAMES, N_FRAME] with their number, n-grams (summary first), labels [n, 4]."""

    frames: npt.NDArray[np.float32]
    n_frames: npt.NDArray[np.int64]
    ngrams: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, n: int, seed: int) -> Examples:
        """At most `n` of them, drawn at random."""
        rows = np.random.default_rng(seed).permutation(len(self))[:n]
        return Examples(self.frames[rows], self.n_frames[rows], self.ngrams[rows], self.labels[rows])

    @classmethod
    def joined(cls, parts: Iterable[Examples]) -> Examples:
        """All of several."""
        columns = zip(*((one.frames, one.n_frames, one.ngrams, one.labels) for one in parts if len(one)), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


def label(shown: Shown) -> list[int]:
    """Class numbers: stage, accumulation, partitioned activations, tensor parallelism; CANNOT_TELL teaches nothing."""
    tensor = CANNOT_TELL if shown.tensor_parallel is None else int(shown.tensor_parallel)
    return [STAGES.index(shown.stage), ACCUMULATIONS.index(shown.accumulation),
            int(shown.partitioned_activations), tensor]  # fmt: skip


def examples(sequences: Iterable[Sequence], seed: int) -> Examples:
    """Some steps of every sequence, with and without gaps, undisturbed and disturbed; most of recorded ones."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], list[int]]] = []
    for sequence in sequences:
        for _ in range(VIEWS[sequence.origin]):
            rate = 0.0 if rng.random() < 0.8 else float(rng.choice([0.002, 0.01, 0.03]))
            codes, gaps_us = one_step(sequence, rng, has_gaps=bool(rng.random() < 0.5), rate=rate)
            if len(codes) < 2:  # one call over and over: never scored
                continue
            step = Step(codes, gaps_us)
            if (step.roles == TINY).all():
                continue
            rows.append((frames(step).astype(np.float32), ngrams(step), label(sequence.shown)))
    table = np.zeros((len(rows), 2 * N_FRAMES, N_FRAME), np.float32)
    for index, row in enumerate(rows):
        table[index, : len(row[0])] = row[0]
    return Examples(
        table, np.array([len(row[0]) for row in rows], np.int64), np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
    )  # fmt: skip


def train_ngram(data: Examples) -> NgramEncoder:
    """Logistic regression per question, on standardised counts; the last steps of its solver change no answer."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    warnings.simplefilter("ignore", ConvergenceWarning)
    mean, scale = _standard(data.ngrams)
    inputs = standardised(data.ngrams, mean, scale)
    outputs, biases = [], []
    for question, n_classes in enumerate((len(STAGES), len(ACCUMULATIONS), 2, 2)):
        labelled = data.labels[:, question] != CANNOT_TELL
        fitted = LogisticRegression(C=3.0, max_iter=200).fit(inputs[labelled], data.labels[labelled, question])
        weights, bias = np.zeros((n_classes, inputs.shape[1])), np.full(n_classes, -30.0)
        if n_classes == 2:
            outputs.append(fitted.coef_)
            biases.append(fitted.intercept_)
            continue
        weights[fitted.classes_], bias[fitted.classes_] = fitted.coef_, fitted.intercept_
        outputs.append(weights)
        biases.append(bias)
    arrays = {"mean": mean, "scale": scale, "output": np.concatenate(outputs), "output_bias": np.concatenate(biases)}
    return NgramEncoder(arrays)


def train_lstm(
    data: Examples, seed: int, n_epochs: int = N_EPOCHS, start: LstmEncoder | None = None, rate: float = RATE
) -> LstmEncoder:
    """Train the LSTM by AdamW; the same seed gives the same weights.

    Args:
        data: examples.
        seed: of the first weights and of the order of the examples.
        n_epochs: passes over the examples.
        start: go on from these weights and this scaling of features; None: from the beginning.
        rate: highest learning rate of the one-cycle schedule.

    Returns:
        The trained encoder.
    """
    import torch
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    mean, scale = _standard(data.ngrams[:, :N_SUMMARY])
    if start:
        mean, scale = start.weights["mean"], start.weights["scale"]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(N_FRAME, N_HIDDEN, batch_first=True)
            self.hidden = nn.Linear(N_HIDDEN + N_SUMMARY, N_DENSE)
            self.output = nn.Linear(N_DENSE, N_OUTPUTS)

        def forward(self, x: torch.Tensor, last: torch.Tensor, known: torch.Tensor) -> Any:
            states, _ = self.lstm(x)
            state = states[torch.arange(len(x)), last]
            return self.output(torch.tanh(self.hidden(torch.cat([state, known], 1))))

    net = Net()
    if start:
        net.load_state_dict(_state(start))
    x = torch.tensor(data.frames, dtype=torch.float32)
    last = torch.tensor(data.n_frames - 1)
    known = torch.tensor(standardised(data.ngrams[:, :N_SUMMARY], mean, scale), dtype=torch.float32)
    y = torch.tensor(data.labels)
    n_batches = -(-len(x) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=n_epochs * n_batches)
    draw = torch.Generator().manual_seed(seed)
    sizes = [len(STAGES), len(ACCUMULATIONS), 2]
    for _ in range(n_epochs):
        order = torch.randperm(len(x), generator=draw)
        for batch in torch.split(order, BATCH):
            scores = net(x[batch], last[batch], known[batch])
            truth = y[batch]
            stages, accumulations, flags = torch.split(scores, sizes, 1)
            loss = nn.functional.cross_entropy(stages, truth[:, 0], label_smoothing=SMOOTHING)
            loss = loss + nn.functional.cross_entropy(accumulations, truth[:, 1], label_smoothing=SMOOTHING)
            labelled = (truth[:, 2:] != CANNOT_TELL).float()
            loss = loss + 0.5 * nn.functional.binary_cross_entropy_with_logits(flags, truth[:, 2:].float(), labelled)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    state = {name: value.detach().double().numpy() for name, value in net.state_dict().items()}
    return LstmEncoder({
        "input": state["lstm.weight_ih_l0"], "recurrent": state["lstm.weight_hh_l0"],
        "bias": state["lstm.bias_ih_l0"] + state["lstm.bias_hh_l0"], "mean": mean, "scale": scale,
        "hidden": state["hidden.weight"], "hidden_bias": state["hidden.bias"],
        "output": state["output.weight"], "output_bias": state["output.bias"],
    })  # fmt: skip


def _state(encoder: LstmEncoder) -> dict[str, Any]:
    """An encoder's weights by torch's names; torch has two biases where one is enough."""
    import torch

    weights = {name: torch.tensor(value, dtype=torch.float32) for name, value in encoder.weights.items()}
    return {
        "lstm.weight_ih_l0": weights["input"], "lstm.weight_hh_l0": weights["recurrent"],
        "lstm.bias_ih_l0": weights["bias"], "lstm.bias_hh_l0": torch.zeros_like(weights["bias"]),
        "hidden.weight": weights["hidden"], "hidden.bias": weights["hidden_bias"],
        "output.weight": weights["output"], "output.bias": weights["output_bias"],
    }  # fmt: skip


def _standard(table: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and reciprocal spread of every column; columns that hardly vary are not blown up."""
    return table.mean(axis=0), 1.0 / np.maximum(table.std(axis=0), 0.02)
