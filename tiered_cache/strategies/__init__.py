"""What a model needs, declared: which components, which pools. One file per kind of model."""
