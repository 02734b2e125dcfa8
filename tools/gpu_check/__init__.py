"""What only a card can show, as one command: `make gpu-check` (docs/gpu.md)."""
