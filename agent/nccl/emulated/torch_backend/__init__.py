"""A process group for torch.distributed whose collectives become calls on an emulated communicator."""
