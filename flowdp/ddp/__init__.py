"""Manual control: replicas and process groups for a loop that averages by itself."""
