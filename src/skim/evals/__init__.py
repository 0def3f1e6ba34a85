"""Quality evaluations: tasks with checkable answers, run in every mode on the same prompts."""
