"""The cluster: agents, the zygote that forks workers, the coordinator, and the generations of living workers."""
