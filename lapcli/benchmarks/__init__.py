"""What `lapcli bench` measures: each module returns rows, and states what they are measured against."""
