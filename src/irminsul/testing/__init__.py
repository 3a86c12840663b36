"""Test doubles that ship with the package: tiny random checkpoints."""
