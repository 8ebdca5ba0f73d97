"""Reveal the order of an engine's sums from results alone, and show an order that was revealed."""
