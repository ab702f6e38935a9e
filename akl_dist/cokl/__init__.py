"""CoKL's reference samples: drawn once before training, kept in the run directory, handed to the learner step by step."""
