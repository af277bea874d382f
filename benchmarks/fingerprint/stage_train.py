"""Trains the stage fingerprint's LSTM and writes its weights: for maintainers, who ship them with the package.

python -m benchmarks stage_train [--out FILE] [--hypothetical-only] [--n-hypothetical N] [--n-each N] [--epochs N]
                                 [--seed N]

It learns recordings, generated runs of named frameworks, and hypothetical runs. Without `--out` it replaces the shipped
weights. `--hypothetical-only` leaves out every named framework, as tests/stage/test_stage_training.py needs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.fingerprint.corpus.dataset import Sequence, generated, hypothetical, one_step, recorded
from benchmarks.lib.argument_types import a_file_to_write, natural, positive
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder, standardised
from zerotune.tuner.fingerprint.encoding.features import N_FRAME, N_FRAMES, N_SUMMARY, frames, summary
from zerotune.tuner.fingerprint.encoding.weights import SHIPPED
from zerotune.tuner.fingerprint.labels import ACCUMULATIONS, N_OUTPUTS, STAGES, Shown
from zerotune.tuner.fingerprint.steps.anatomy import TINY, Step

N_HIDDEN: Final = 32
N_DENSE: Final = 128
N_EPOCHS: Final = 25
N_HYPOTHETICAL: Final = 60_000
RATE: Final = 4e-3
CANNOT_TELL: Final = -1
VIEWS: Final = {"recorded": 12, "generated": 4, "hypothetical": 1}
BATCH: Final = 96
SMOOTHING: Final = 0.02


class Examples(NamedTuple):
    """Steps as arrays: frames [n, 2 N_FRAMES, N_FRAME] with their number, summaries, labels [n, 4]."""

    frames: npt.NDArray[np.float32]
    n_frames: npt.NDArray[np.int64]
    summaries: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]


def label(shown: Shown) -> list[int]:
    """Class numbers: stage, accumulation, partitioned activations, tensor parallelism; CANNOT_TELL teaches nothing."""
    tensor = CANNOT_TELL if shown.tensor_parallel is None else int(shown.tensor_parallel)
    return [STAGES.index(shown.stage), ACCUMULATIONS.index(shown.accumulation),
            int(shown.partitioned_activations), tensor]  # fmt: skip


def examples(sequences: Iterable[Sequence], seed: int) -> Examples:
    """Some steps of every sequence, with and without gaps, undisturbed and disturbed; more of recorded sequences."""
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
            rows.append((frames(step).astype(np.float32), summary(step), label(sequence.shown)))
    table = np.zeros((len(rows), 2 * N_FRAMES, N_FRAME), np.float32)
    for index, row in enumerate(rows):
        table[index, : len(row[0])] = row[0]
    return Examples(
        table, np.array([len(row[0]) for row in rows], np.int64), np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
    )  # fmt: skip


def train_lstm(data: Examples, seed: int, n_epochs: int = N_EPOCHS) -> LstmEncoder:
    """Train the LSTM by AdamW; the same seed gives the same weights."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    mean = data.summaries.mean(axis=0)
    scale = 1.0 / np.maximum(data.summaries.std(axis=0), 0.02)  # columns that hardly vary are not blown up

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
    x = torch.tensor(data.frames, dtype=torch.float32)
    last = torch.tensor(data.n_frames - 1)
    known = torch.tensor(standardised(data.summaries, mean, scale), dtype=torch.float32)
    y = torch.tensor(data.labels)
    n_batches = -(-len(x) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=n_epochs * n_batches)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=a_file_to_write, default=SHIPPED, help="file for the weights")
    parser.add_argument("--hypothetical-only", action="store_true", help="learn nothing that has a name")
    parser.add_argument("--n-hypothetical", type=positive, default=N_HYPOTHETICAL, help="runs of no framework")
    parser.add_argument("--n-each", type=positive, default=120, help="generated runs per framework")
    parser.add_argument("--epochs", type=positive, default=N_EPOCHS, help="passes over the examples")
    parser.add_argument("--seed", type=natural, default=0, help="of the generator and of training")
    arguments = parser.parse_args()
    seed = arguments.seed
    parts = [examples(hypothetical(arguments.n_hypothetical, seed), seed)]
    if not arguments.hypothetical_only:
        parts.append(examples(chain(recorded(), generated(arguments.n_each, seed)), seed))
    data = Examples(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    blob = train_lstm(data, seed, arguments.epochs).to_bytes()
    arguments.out.write_bytes(blob)
    print(f"learned {len(data.labels):,} steps: {len(blob):,} bytes in {arguments.out}")


if __name__ == "__main__":
    main()
