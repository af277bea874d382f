"""Sweeps in NVIDIA's tuner CSV of machines that nobody described, to be judged like anybody's own.

    python -m benchmarks generated_csvs FOLDER [--machines N] [--seed S] [--noise 0.03] [--nodes N ...] [--keys N ...]
    python -m benchmarks policy_regret --data FOLDER --only machine

A machine has 1, 4, 16 or 64 nodes of eight ranks, or is measured on each of `--nodes`. By algorithm and protocol it has
a random latency that grows with the ranks and a random bandwidth, the same on any number of nodes, that saturates, or
falls again, over channels. NCCL's own choice is the ring, with a
protocol by size. On little traffic fewer channels run than are asked for (`cost_model.channels_used`). One call per
row. With `--keys` only so many sizes of the collectives are measured, drawn at random.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.lib.argument_types import a_folder_to_write, natural, positive, share_of_noise, whole
from zerotune.agent.nccl.cost_model import channels_used
from zerotune.store.records import Algorithm, Collective, Protocol

COLUMNS = (
    *("collective", "size_bytes", "algorithm", "protocol", "channels", "nodes", "ranks"),
    *("pipeOps", "regBuff", "cost_metric", "bandwidth_gbps", "latency_us"),
)
NAMES = {Collective.all_gather: "allgather", Collective.reduce_scatter: "reducescatter"}
SETTINGS = (
    (Algorithm.ring, Protocol.ll),
    (Algorithm.ring, Protocol.ll128),
    (Algorithm.ring, Protocol.simple),
    (Algorithm.pat, Protocol.simple),
    (Algorithm.nvls, Protocol.simple),
)
CHANNELS = (1, 2, 4, 8, 16, 24, 32)
SIZES = tuple(1 << exponent for exponent in range(12, 29))
N_NODES = (1, 4, 16, 64)
RANKS_PER_NODE = 8
MOST_NODES = 100_000
FIRST_SEED = 100

Truth = dict[tuple[Algorithm, Protocol], tuple[float, float, float, float, float]]


def truth(rng: np.random.Generator) -> Truth:
    """A machine's truth by setting, at random.

    Each is (latency of a hop in us, latency of the rest in us, bytes per us of the full bandwidth, channels that reach
    it, share of it that each further channel costs).
    """
    found: Truth = {}
    for algorithm, protocol in SETTINGS:
        per_hop_us = {Protocol.ll: 0.8, Protocol.ll128: 1.1, Protocol.simple: 2.0}[protocol] * rng.uniform(0.6, 1.8)
        share = {Protocol.ll: 0.3, Protocol.ll128: 0.9, Protocol.simple: 1.0}[protocol]
        found[algorithm, protocol] = (
            float(per_hop_us),
            float(rng.uniform(8.0, 25.0)),
            float(share * rng.uniform(40e3, 100e3)),
            float(rng.uniform(4.0, 24.0)),
            float(rng.choice([0.0, 0.004, 0.012])),
        )
    return found


def duration_us(
    known: Truth, kind: Collective, setting: tuple[Algorithm, Protocol], n_ranks: int, nbytes: int, asked: int
) -> float:
    """How long a call takes on this machine, without noise.

    Args:
        known: the machine, see `truth`.
        kind: what is called.
        setting: algorithm and protocol.
        n_ranks: of the communicator.
        nbytes: NCCL's nBytes, the whole buffer.
        asked: channels that are asked for; with little traffic fewer run.

    Returns:
        Microseconds.
    """
    per_hop_us, rest_us, bytes_per_us, filled_by, too_many = known[setting]
    n_hops = n_ranks - 1 if setting[0] is Algorithm.ring else np.log2(n_ranks)
    n_channels = max(1, int(channels_used(kind, setting[1], nbytes, asked)))
    reached = min(1.0, (n_channels / filled_by) ** 0.7) * (1.0 - too_many * max(0.0, n_channels - filled_by))
    return float(rest_us + n_hops * per_hop_us + 0.1 * n_channels + nbytes / (bytes_per_us * reached))


def nccls_choice(nbytes: int) -> tuple[Algorithm, Protocol]:
    """The ring, with a protocol by size."""
    if nbytes < 32 << 10:
        return Algorithm.ring, Protocol.ll
    return Algorithm.ring, Protocol.ll128 if nbytes < 4 << 20 else Protocol.simple


def write(path: Path, seed: int, noise: float, node_counts: Sequence[int], n_keys: int | None = None) -> None:
    """One machine's sweep in NVIDIA's tuner CSV.

    Args:
        path: of the file.
        seed: of the machine and of its noise.
        noise: of one call, standard deviation of its logarithm.
        node_counts: nodes that each size is measured on, with eight ranks each.
        n_keys: so many of (collective, nodes, size), drawn at random; None: all.
    """
    rng = np.random.default_rng([seed, 41])
    keys = [(name, node_count, nbytes) for name in NAMES.values() for node_count in node_counts for nbytes in SIZES]
    if n_keys is not None:
        chosen = np.random.default_rng([seed, 43]).permutation(len(keys))[:n_keys]
        keys = [keys[at] for at in chosen.tolist()]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for kind, name in NAMES.items():
            known = truth(rng)
            for n_nodes, nbytes in itertools.product(node_counts, SIZES):
                if (name, n_nodes, nbytes) not in keys:
                    continue
                n_ranks = n_nodes * RANKS_PER_NODE
                asked = [(*setting, count, setting) for setting in SETTINGS for count in CHANNELS]
                own = nccls_choice(nbytes)
                for algorithm, protocol, count, setting in [*asked, ("default", "default", CHANNELS[-1], own)]:
                    us = duration_us(known, kind, setting, n_ranks, nbytes, count) * np.exp(rng.normal(0.0, noise))
                    said = [getattr(one, "name", one) for one in (algorithm, protocol)]
                    rows.writerow([name, nbytes, *said, count, n_nodes, n_ranks, -1, -1, "", "", f"{us:.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=a_folder_to_write)
    parser.add_argument("--machines", type=positive, default=8, metavar="N")
    parser.add_argument("--seed", type=natural, default=FIRST_SEED, help="of the first machine")
    parser.add_argument("--noise", type=share_of_noise, default=0.03, help="of one call (log)")
    parser.add_argument(
        "--nodes", type=whole(1, MOST_NODES), nargs="+", metavar="N", help="measure every machine on these"
    )
    parser.add_argument("--keys", type=positive, nargs="+", metavar="N", help="so many keys each, machines in turn")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.machines):
        node_counts = arguments.nodes or (N_NODES[seed % len(N_NODES)],)
        # Every number of keys meets every number of nodes.
        n_keys = arguments.keys[seed // len(N_NODES) % len(arguments.keys)] if arguments.keys else None
        write(arguments.folder / f"machine_{seed}.csv", seed, arguments.noise, node_counts, n_keys)
    print(f"{arguments.machines} sweeps in {arguments.folder}")


if __name__ == "__main__":
    main()
