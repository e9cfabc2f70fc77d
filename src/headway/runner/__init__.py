"""From a step's plan to its tokens: flat batches, the model, the sampler."""
