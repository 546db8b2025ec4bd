"""How replicas become one again."""
