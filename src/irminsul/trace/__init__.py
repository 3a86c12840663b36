"""Request logs: reading them, replaying them, and what reuse they hold."""
