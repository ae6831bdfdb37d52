"""Decisions: pure functions from layer costs, workers and losses to pipelines, each with its reason.

No file, clock or network is read here. The same input gives the same answer on every worker.
"""
