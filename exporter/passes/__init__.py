"""Graph passes: one file each, saying what it requires and ensures, returning a changed model."""
