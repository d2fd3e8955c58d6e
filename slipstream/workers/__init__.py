"""Child processes for work that is not trusted to end: lines of JSON in and out, each within its time and memory."""
