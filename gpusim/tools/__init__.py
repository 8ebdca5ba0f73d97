"""The commands and studies built on gpusim. No program of a user needs to import them."""
