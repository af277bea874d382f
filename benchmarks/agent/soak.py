"""Many collectives on several ranks while the plan changes all the time.

Rank 0 offers a new plan every few calls, cycling through settings; the emulated NCCL checks on every call
that all ranks chose alike. At the end every call must be accounted for: timed records drained plus counted
drops. Prints the counts; exit code 1 when a call disagreed or a record is missing. `soak_daemon` tells what grows.

Run: python -m benchmarks soak --collectives 100000 --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from benchmarks.lib.free_port import free_port

CALLS_PER_OFFER = 20


def rank_main(n_collectives: int) -> None:
    import torch.distributed as dist

    import zerotune.agent.nccl.emulated as emulated
    from benchmarks.agent.soak_worker import collectives
    from zerotune.agent.agreement import Agreement
    from zerotune.agent.agreement.news import Offered, PollFor
    from zerotune.agent.job_store import open_job_store
    from zerotune.agent.nccl import catalog, library
    from zerotune.store.records import Collective, CommunicatorClass, Plan, PlanRow
    from zerotune.store.wire import FLAG_TIMED

    plugin = library.load()
    os.environ["NCCL_TUNER_PLUGIN"] = os.environ["NCCL_PROFILER_PLUGIN"] = str(plugin.path)
    dist.init_process_group("emulated_nccl")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    plugin.set_observing(True)
    agreement = Agreement(open_job_store(), rank, n_ranks, plugin, lambda _: None)
    agreement.post(PollFor(float("inf")))
    shape = CommunicatorClass(n_ranks, n_ranks)
    cells = [
        candidate for candidate in catalog.candidates(Collective.all_gather, shape, 8) if not candidate.is_baseline
    ]
    n_timed, epochs, epoch = 0, 1, 0
    began = time.perf_counter()
    for call in collectives(rank, n_ranks, n_collectives):
        if call % CALLS_PER_OFFER == CALLS_PER_OFFER - 1:
            if rank == 0:
                offer = call // CALLS_PER_OFFER + 1
                rows = tuple(
                    PlanRow(shape, collective, None, 1, 2**40, cells[offer % len(cells)])
                    for collective in (Collective.all_gather, Collective.reduce_scatter)
                )
                agreement.post(Offered(Plan(epoch=offer, rows=rows)))
            adopted = plugin.active_epoch()
            epochs += adopted != epoch
            epoch = adopted
            block = plugin.drain()
            n_timed += int(((block["flags"] & FLAG_TIMED) != 0).sum())
    seconds = time.perf_counter() - began
    dist.barrier()
    block = plugin.drain()
    n_timed += int((((block["flags"] & FLAG_TIMED) != 0) & (block["collective"] != Collective.all_reduce)).sum())
    counters = plugin.counters()
    agreement.close()
    document = {
        "rank": rank,
        "n_collectives": n_collectives,
        "n_epochs": epochs,
        "n_disagreements": emulated.journal().n_disagreements,
        "n_timed": n_timed,
        "n_dropped": counters.n_dropped_records + counters.n_lost_events + counters.n_abandoned_events,
        "collectives_per_s": n_collectives / seconds,
    }
    # One write, so that ranks' lines do not mix.
    os.write(1, (json.dumps(document) + "\n").encode())
    dist.destroy_process_group()


def soak(n_collectives: int, n_ranks: int, fabric: str) -> list[dict[str, float]]:
    """Run the ranks, each a process."""
    port = str(free_port())
    processes = []
    for rank in range(n_ranks):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(n_ranks),
            "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ZEROTUNE_FABRIC": fabric,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.agent.soak", "--rank-of", str(n_collectives)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    try:
        printed = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank failed: exit codes {[process.returncode for process in processes]}")
    return [json.loads(lines.strip().splitlines()[-1]) for lines in printed]


def main() -> None:
    from benchmarks.lib.argument_types import a_fabric, positive, whole
    from zerotune.agent.nccl import fabric

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--collectives", type=positive, default=100_000)
    parser.add_argument("--ranks", type=whole(2), default=4)
    parser.add_argument("--fabric", type=a_fabric, default="ethernet_boxes")
    parser.add_argument("--quick", action="store_true", help="2,000 collectives")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of)
        return
    room = fabric.load(arguments.fabric).max_ranks
    if arguments.ranks > room:
        parser.error(
            f"--ranks {arguments.ranks}: fabric {arguments.fabric} has {room}; use fewer, or a larger --fabric"
        )
    from benchmarks.lib.reporting import Result, report

    n_collectives = 2000 if arguments.quick else arguments.collectives
    ranks = soak(n_collectives, arguments.ranks, arguments.fabric)
    lost = max(r["n_collectives"] - r["n_timed"] - r["n_dropped"] for r in ranks)
    n_disagreements = max(r["n_disagreements"] for r in ranks)
    report(
        "soak",
        [
            Result("n_collectives_per_rank", ranks[0]["n_collectives"], "calls"),
            Result("n_epochs", min(r["n_epochs"] for r in ranks), "plans"),
            Result("n_disagreements", n_disagreements, "calls", "0"),
            Result("n_lost_records", lost, "records", "0"),
            Result("n_dropped_records", max(r["n_dropped"] for r in ranks), "records"),
            Result("collectives_per_s", min(r["collectives_per_s"] for r in ranks), "1/s"),
        ],
        as_json=arguments.json,
    )
    sys.exit(1 if n_disagreements or lost or len({r["n_epochs"] for r in ranks}) != 1 else 0)


if __name__ == "__main__":
    main()
