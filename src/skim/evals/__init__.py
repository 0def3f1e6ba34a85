"""Quality, measured: tasks with answers that can be checked, asked in every mode on the same prompts."""
