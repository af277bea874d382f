"""What NCCL is, as far as we touch it: catalog, cost model, plugin, emulation."""
