"""Integrations: trainers that people use, each with its own library, which only it imports."""
