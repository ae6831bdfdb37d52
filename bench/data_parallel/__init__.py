"""Workload and contestants of the races in which every worker holds the whole model."""
