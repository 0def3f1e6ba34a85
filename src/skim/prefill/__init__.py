"""What of the prompt to read: its anatomy, scorers, the selection of blocks and the plan that results."""
