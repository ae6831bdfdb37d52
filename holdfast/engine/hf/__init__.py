"""Models of Hugging Face's transformers, cut into layers. It is imported only if a model comes from it."""
