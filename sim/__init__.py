"""Discrete-event simulator: the real scheduler, a fake device with shadow cells, a virtual clock."""
