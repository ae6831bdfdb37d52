"""Who does what: pure functions from membership to roles."""
