"""Hugging Face's Accelerate: `prepare` makes DDP of the model, and with --zero3 DeepSpeed's ZeRO-3."""

import torch
import toy
from accelerate import Accelerator, DeepSpeedPlugin, PartialState

parser = toy.parser()
parser.add_argument("--zero3", action="store_true")
options = parser.parse_args()

zero3 = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3, **toy.DEEPSPEED_3},
}
PartialState(cpu=not torch.cuda.is_available())
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero3) if options.zero3 else None)
model = toy.model(options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
log = toy.LossLog(options.losses, accelerator.process_index)
for inputs in toy.batches(options, accelerator.process_index):
    loss = toy.loss_of(model, inputs)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    log.add(loss.detach())
accelerator.end_training()
