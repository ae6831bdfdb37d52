"""The coordinator as a role that any agent can hold, elected through etcd. docs/cluster.md describes it for users."""
