"""Our own model of NCCL: it decides by its cost model, and calls the plugins as NCCL does."""
