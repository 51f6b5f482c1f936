"""The engine worker: models, paged attention, sampler and the process that owns the tensors."""
