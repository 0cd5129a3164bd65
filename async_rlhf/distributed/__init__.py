"""Many processes: what a learner's ranks say to each other, who notices when one fails, and Ray's actors and tasks."""
