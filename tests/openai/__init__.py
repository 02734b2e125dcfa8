"""Tests of the HTTP adapter."""
