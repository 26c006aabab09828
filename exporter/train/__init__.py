"""Training heads for a target of the user's own: the data it answers itself, the trainer, and what measures the fit."""
