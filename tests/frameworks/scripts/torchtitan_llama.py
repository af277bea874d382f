"""torchtitan's Llama 3, sharded and clipped by torchtitan; its trainer and its attention need a GPU."""

import torch
import torch.distributed as dist
import toy
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_, dist_sum_tensor
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

options = toy.parser().parse_args()
dist.init_process_group()
device = toy.device()
mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))

config = model_registry("debugmodel").model
for layer in config.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
with torch.device("meta"):
    model = config.build()
apply_fsdp_to_decoder(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
model.to_empty(device=device)
torch.manual_seed(1)
with torch.no_grad():
    model.init_weights()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
log = toy.LossLog(options.losses, dist.get_rank())
draw = torch.Generator().manual_seed(100 + dist.get_rank())
positions = torch.arange(32, device=device).expand(2, -1)
for _ in range(options.steps):
    tokens = torch.randint(2048, (2, 33), generator=draw).to(device)
    n_tokens = dist_sum_tensor(torch.tensor(positions.numel(), device=device), mesh)
    predicted = model(tokens[:, :-1], positions).flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(predicted, tokens[:, 1:].flatten(), reduction="sum") / n_tokens
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log.add(loss.detach())
dist.destroy_process_group()
