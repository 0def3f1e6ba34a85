"""Learns how much each attention head says about evidence, from facts whose place in a prompt is known."""
