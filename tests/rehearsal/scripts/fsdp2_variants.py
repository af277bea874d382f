"""FSDP2 whose gathers try two other communicators. Their device memory is what the log says, and it is given back."""

import logging
import re

import zerotune

zerotune.enable(communicator_variants=[{"max_ctas": 4}, {"min_ctas": 32, "max_ctas": 32}])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import toy  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

TAKEN = re.compile(r"took (\d+) MB")
options = toy.parser().parse_args()
messages: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("zerotune.variants").addHandler(handler)
logging.getLogger("zerotune.variants").setLevel(logging.INFO)

dist.init_process_group("nccl")
torch.cuda.set_device(toy.device())
model = toy.model(options).to(toy.device())
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
log = toy.LossLog(options.losses, dist.get_rank())
free_bytes, n_groups = [], []
for inputs in toy.batches(options, dist.get_rank()):
    loss = toy.loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log.add(loss)
    torch.cuda.synchronize()
    free_bytes.append(torch.cuda.mem_get_info()[0])
    n_groups.append(len(c10d._world.pg_map))

if dist.get_rank() == 0:
    print(*messages, sep="\n", flush=True)
    taken_mb = [int(found[1]) for line in messages if (found := TAKEN.search(line))]
    assert len(taken_mb) == 2, messages
    made_at = n_groups.index(3)
    grown_mb = (free_bytes[made_at - 1] - free_bytes[made_at]) / 1e6
    assert abs(grown_mb - sum(taken_mb)) < 0.01 * sum(taken_mb), (grown_mb, taken_mb)
    verdicts = [line for line in messages if line.startswith("zerotune: gathers use") or "gathers stay with" in line]
    assert len(verdicts) >= 2, messages
    assert n_groups[-1] == 1 + any("gathers use" in line for line in verdicts), n_groups
    assert free_bytes[-1] > free_bytes[made_at], "nothing was given back"
dist.destroy_process_group()
