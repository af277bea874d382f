"""NCCL: its settings, its cost model, the plugin, the emulation."""
