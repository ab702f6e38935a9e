"""The embedded tiny tasks and models: generated sums, products that take a tool, a byte tokenizer, two trained 0.6M-parameter
Qwen2."""
from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""Folder of the shipped checkpoint, in the layout that `from_pretrained` and vLLM load."""
TOOL_MODEL_DIR = MODEL_DIR.with_name("tool_model")
"""Folder of the checkpoint that calls Python for products."""
