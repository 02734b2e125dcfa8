"""Checkpoints of a training run: parameters, optimiser and step in one file, replaced in one move."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer


def load(folder: Path, model: nn.Module, optimiser: Optimizer) -> int:
    """The step to go on with; 0 without a checkpoint."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return state["step"]


def store(folder: Path, model: nn.Module, optimiser: Optimizer, step: int) -> None:
    """A kill at any moment leaves the old or the new one."""
    path = folder / "checkpoint.pt"
    partial = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, partial)
    os.replace(partial, path)
