"""torch.distributed's side: a process group whose collectives become calls on an emulated communicator."""
