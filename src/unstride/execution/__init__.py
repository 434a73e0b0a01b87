"""A recipe at work: one loop (`runner.run`) over stages, views and states, with the model or its captured graph."""
