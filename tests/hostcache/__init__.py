"""Tests of the host cache."""
