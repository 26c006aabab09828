"""Device profiles: what a device costs per step, and the plans that follow from it."""
