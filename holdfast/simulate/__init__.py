"""Simulation of training systems along a failure trace: throughput, and GPU-hours used, idle and lost."""
