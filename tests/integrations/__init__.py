"""Tests of holdfast.integrations."""
