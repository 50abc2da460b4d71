"""What studies share: commands side by side, results as lines that add up, a corpus, and tables in a page."""
