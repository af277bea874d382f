"""hf_trainer.py, but transformers is imported before torch: it looks for torch, and imports it later."""

import sys

import transformers

assert "torch" not in sys.modules, f"transformers {transformers.__version__} has imported torch already"
import hf_trainer  # noqa: E402, F401  (it trains)
