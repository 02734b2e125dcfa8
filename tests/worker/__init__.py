"""Tests of the worker's shell."""
