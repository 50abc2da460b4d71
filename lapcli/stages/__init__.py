"""The stages: each a plain function from settings and artifacts to the artifact that it wrote."""
