"""The embedded tiny task and model: generated sums, a byte tokenizer, a trained 0.6M-parameter Qwen2."""
from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""Folder of the shipped checkpoint, in the layout that `from_pretrained` and vLLM load."""
