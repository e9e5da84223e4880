"""The memory layer: pages, tiers, pins, reservations, transfers. Knows no model and no step."""
