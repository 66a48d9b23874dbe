"""Use of extractors: evidence from passages, for a model that answers or inside the searches of an agent."""
