"""What lies behind `serving_study.py`: a conversion of drawn weights, pieces of evidence, and their tables."""
