"""Reports: what a run or a sweep did and found, as one HTML file and one Markdown file. The stage is `reporting`."""
