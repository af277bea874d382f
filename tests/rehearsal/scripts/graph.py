"""Collectives captured in a CUDA graph and replayed."""

import torch
import torch.distributed as dist
import toy

options = toy.parser().parse_args()
dist.init_process_group("nccl")
rank, n_ranks, device = dist.get_rank(), dist.get_world_size(), toy.device()
torch.cuda.set_device(device)
fed, shared = torch.zeros(1 << 16, device=device), torch.zeros(1 << 16, device=device)
dist.all_reduce(shared)  # NCCL connects before it is captured
gathered = torch.zeros(n_ranks << 16, device=device)
dist.all_gather_into_tensor(gathered, shared)
torch.cuda.synchronize()

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    shared.copy_(fed)
    dist.all_reduce(shared)
    dist.all_gather_into_tensor(gathered, shared)

for step in range(options.steps):
    fed.copy_(torch.full((1 << 16,), float(rank + step)))
    graph.replay()
    expected = sum(each + step for each in range(n_ranks))
    assert gathered.cpu().unique().tolist() == [expected], (step, gathered)

weights = torch.nn.Parameter(torch.zeros(1 << 16, device=device))
optimizer = torch.optim.AdamW([weights])
for _ in range(options.steps):  # steps, so that the agent has boundaries
    graph.replay()
    loss = (weights * gathered[: 1 << 16]).sum()
    loss.backward()
    dist.all_reduce(weights.grad)
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
del graph
dist.destroy_process_group()
