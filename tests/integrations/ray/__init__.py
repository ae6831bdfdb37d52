"""Tests of holdfast.integrations.ray, on a real Ray."""
