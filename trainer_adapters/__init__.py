"""One module per trainer, each of which imports only `weightsync.client`. None yet."""
