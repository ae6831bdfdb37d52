"""Who is alive: agents, the zygote that forks workers, the coordinator, generations."""
