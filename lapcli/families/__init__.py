"""Model families: adapters that declare where the key axis lives, and the loading of models."""
