"""The API process: translates HTTP into calls to the controller, and nothing else."""
