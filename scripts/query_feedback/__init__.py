"""The study of query feedback: its commands, its lines of results, its tables, and the model that may ship."""
