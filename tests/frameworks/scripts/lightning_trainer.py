"""Lightning's Trainer: DDP, and with --sharded FSDP2 through its ModelParallelStrategy."""

import lightning
import torch
import toy
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Module(lightning.LightningModule):
    """The toy model, as a module of Lightning's."""

    def __init__(self, options):
        super().__init__()
        self.options = options
        self.model = toy.model(options)

    def configure_model(self):
        if self.options.sharded:
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def on_fit_start(self):
        self.losses = toy.LossLog(self.options.losses, self.global_rank)

    def training_step(self, inputs):
        loss = toy.loss_of(self.model, inputs)
        self.losses.add(loss.detach())
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(list(toy.batches(self.options, self.global_rank)), batch_size=None)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


parser = toy.parser()
parser.add_argument("--sharded", action="store_true")
options = parser.parse_args()
strategy = ModelParallelStrategy(2, 1) if options.sharded else DDPStrategy(bucket_cap_mb=0.1)
trainer = lightning.Trainer(
    accelerator="auto",
    devices=2,
    strategy=strategy,
    max_epochs=1,
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Module(options))
