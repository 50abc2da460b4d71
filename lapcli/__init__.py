"""lapcli: state reduction for language models with a recurrent matrix state."""

__version__ = "0.1.0"
