"""The Trainer of Hugging Face's transformers: DDP, with --zero3 DeepSpeed's ZeRO-3, and with --fsdp FSDP2."""

import tempfile

import torch
import toy
from accelerate import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = toy.parser()
parser.add_argument("--zero3", action="store_true")
parser.add_argument("--fsdp", action="store_true")
options = parser.parse_args()


class LoggedTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        log.add(loss.detach())
        return loss


zero3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 3, **toy.DEEPSPEED_3},
}
settings = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=options.steps,
    per_device_train_batch_size=8,
    use_cpu=not torch.cuda.is_available(),
    deepspeed=zero3 if options.zero3 else None,
    fsdp=options.fsdp or None,
    ddp_find_unused_parameters=False,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
if options.fsdp and not torch.cuda.is_available():
    # Accelerate shards for no CPU, although FSDP2 does; this is all that it asks.
    settings.distributed_state.distributed_type = DistributedType.MULTI_GPU
log = toy.LossLog(options.losses, settings.process_index)
torch.manual_seed(1)
shape = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None)
tokens = torch.randint(256, (16 * options.steps, 32))
trainer = LoggedTrainer(GPT2LMHeadModel(shape), settings, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
trainer.train()
