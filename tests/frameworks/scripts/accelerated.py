"""HF Accelerate: what `prepare` makes of a model on several processes is DDP."""

import torch
import toy
from accelerate import Accelerator

options = toy.parser().parse_args()
accelerator = Accelerator(cpu=not torch.cuda.is_available())
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
