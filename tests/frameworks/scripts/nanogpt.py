"""A GPT as nanoGPT trains it: compiled, in DDP, its gradients reduced in the last of a step's micro-batches."""

import torch
import torch.distributed as dist
import toy
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

N_MICRO_BATCHES = 3
N_WORDS, N_CONTEXT, N_HEADS = 256, 32, 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        parts = self.queries_keys_values(self.attention_norm(x)).chunk(3, -1)
        heads = (part.unflatten(-1, (N_HEADS, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Its head is the embedding of words."""

    def __init__(self, n_blocks, width):
        super().__init__()
        self.words, self.places = nn.Embedding(N_WORDS, width), nn.Embedding(N_CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, N_WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


options = toy.parser().parse_args()
dist.init_process_group()
device = toy.device()
torch.manual_seed(1)
model = GPT(options.blocks, options.width).to(device)
decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
scaler = torch.amp.GradScaler(device.type, enabled=False)  # as with bf16
ids = [device] if device.type == "cuda" else None
model = DistributedDataParallel(torch.compile(model), device_ids=ids, bucket_cap_mb=1.0)
log = toy.LossLog(options.losses, dist.get_rank())
draw = torch.Generator().manual_seed(100 + dist.get_rank())
for _ in range(options.steps):
    for micro_batch in range(N_MICRO_BATCHES):
        model.require_backward_grad_sync = micro_batch == N_MICRO_BATCHES - 1
        tokens = torch.randint(N_WORDS, (2, N_CONTEXT + 1), generator=draw).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / N_MICRO_BATCHES
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    log.add(loss.detach())
dist.destroy_process_group()
