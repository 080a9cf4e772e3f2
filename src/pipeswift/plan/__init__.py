"""Plans: what a model's layers cost, and how they are best cut into stages."""
