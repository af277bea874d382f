"""DeepSpeed ZeRO 1, 2 or 3 with a torch optimizer."""

import deepspeed
import torch
import toy

parser = toy.parser()
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--no-norm", action="store_true", help="no rank looks at gradients before it steps; stages 1 and 2")
options = parser.parse_args()

deepspeed.init_distributed()
model = toy.model(options)
zero = {"stage": options.stage, "reduce_bucket_size": 40_000, "allgather_bucket_size": 40_000}
unclipped = {"gradient_clipping": 0.0} if options.no_norm else {}
if options.no_norm:
    zero["compute_grad_norm"] = False
if options.stage == 3:
    zero |= toy.DEEPSPEED_3
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": options.bf16},
        "zero_optimization": zero,
        **unclipped,
    },
)
log = toy.LossLog(options.losses, engine.global_rank)
for inputs in toy.batches(options, engine.global_rank):
    outputs = engine(inputs.bfloat16() if options.bf16 else inputs)
    loss = (outputs.float() - inputs.flip(1)).square().mean()
    engine.backward(loss)
    engine.step()
    log.add(loss.detach())
engine.destroy()
torch.distributed.destroy_process_group()
